"""The `qkvshare` command: a skin over the library. Only this package knows typer and rich."""
