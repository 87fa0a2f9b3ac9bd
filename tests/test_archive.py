"""Cards in one file: carried elsewhere whole, or refused by type with the store as it was."""

from __future__ import annotations

import dataclasses
import io
import os
import pickle
import random
import stat
import struct
import zipfile
import zlib
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
import store_work
from reference import T, pair, probe
from store_work import fill, make_manager, package_of, save, whole_number

from mlx_qkvshare import AgentSession, CardStore, SharedKVCacheManager, archive, export_card, import_card, restore
from mlx_qkvshare.card import decode
from mlx_qkvshare.digest import digest_buffers
from mlx_qkvshare.errors import (
    CardCorruptError,
    CardError,
    CardFormatError,
    CardNotFoundError,
    CardWriteError,
    InvalidValueError,
    RevokedError,
)

REFUSED = (CardCorruptError, CardFormatError)


@pytest.fixture
def store(tmp_path):
    return CardStore(tmp_path / "store")


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Bytes of an archive of two segments, and the number in it."""
    folder = tmp_path_factory.mktemp("exported")
    store, manager = CardStore(folder / "store"), make_manager()
    prefix = fill(manager, 7, 12)
    fill(manager, 7, 5, prefix)
    manager.save_card(store, "card", package_of(manager, prefix, number=7))
    export_card(store, "card", folder / "card.zip")
    return (folder / "card.zip").read_bytes()


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file() and path.name != ".lock"}


def signed(raw: bytes) -> bytes:
    """With a digest that holds, as somebody would have it who wants to do harm."""
    return raw[:-32] + digest_buffers([memoryview(raw[:-32])]).encode()


def members_of(raw: bytes) -> list[tuple[str, bytes]]:
    with zipfile.ZipFile(io.BytesIO(raw)) as file:
        return [(it.filename, file.read(it)) for it in file.infolist()]


def made(members, change=lambda info: None, compression=zipfile.ZIP_STORED) -> bytes:
    """An archive in our form but for what `change` does to each member, with a digest that holds."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as file:
        file.comment = b"0" * 32
        for name, data in members:
            info = archive._member(name)
            info.compress_type = compression
            change(info)
            file.writestr(info, data)
    return signed(out.getvalue())


def refused(store: CardStore, folder: Path, raw: bytes, *kinds: type[Exception]) -> None:
    (file := folder / "it.zip").write_bytes(raw)
    before = contents(store.folder)
    with pytest.raises(kinds or REFUSED):
        import_card(store, file, "elsewhere")
    assert contents(store.folder) == before


# --- there and back ----------------------------------------------------------------------------------


def test_a_card_arrives_as_it_was_and_is_gone_on_from(store, tmp_path):
    manager, owner = pair(tokens=90)
    owner.say("What has to be done?")
    card = manager.save_card(store, "plan", owner)
    assert export_card(store, "plan", tmp_path / "plan.zip") == card
    other = CardStore(tmp_path / "other")
    assert import_card(other, tmp_path / "plan.zip") == card and other.verify("plan") == card
    renamed = import_card(other, tmp_path / "plan.zip", "../[bold]x")
    assert renamed == dataclasses.replace(card, name="../[bold]x") == other.inspect("../[bold]x")
    session = AgentSession("owner", T, SharedKVCacheManager(T.spec))
    restore(session, other, "../[bold]x")
    assert np.array_equal(probe(session), probe(owner)) and session.messages == owner.messages
    assert len(list((other.folder / "segments").iterdir())) == len(card.segments), "shared by both"


def test_equal_cards_give_equal_files_that_only_their_owner_reads(store, tmp_path, exported):
    import_card(store, _file(tmp_path, exported))
    before = os.umask(0)
    try:
        export_card(store, "card", tmp_path / "again.zip")
    finally:
        os.umask(before)
    assert (tmp_path / "again.zip").read_bytes() == exported
    assert stat.S_IMODE((tmp_path / "again.zip").stat().st_mode) == 0o600
    assert zipfile.ZipFile(tmp_path / "again.zip").testzip() is None, "a plain zip, for everybody"
    assert len(exported) < store.stored_bytes("card") + 1500


def _file(folder: Path, raw: bytes) -> Path:
    (file := folder / "it.zip").write_bytes(raw)
    return file


def test_a_name_that_is_taken_is_kept_unless_it_is_to_be_replaced(store, tmp_path, exported):
    save(make_manager(), store, 1, 10)
    before = contents(store.folder)
    with pytest.raises(CardError, match="'card': expected a free name"):
        import_card(store, _file(tmp_path, exported))
    assert contents(store.folder) == before
    import_card(store, _file(tmp_path, exported), replace=True)
    assert store.verify("card").num_tokens == 17


def test_what_was_revoked_does_not_come_back(store, tmp_path):
    manager = make_manager()
    prefix = fill(manager, 1, 10)
    manager.save_card(store, "card", package_of(manager, prefix, number=1))
    export_card(store, "card", tmp_path / "it.zip")
    manager.revoke(prefix.views[0].segment.slot, stores=[store])
    before = contents(store.folder)
    for options in ({}, {"name": "other"}, {"replace": True}):
        with pytest.raises(RevokedError):
            import_card(store, tmp_path / "it.zip", **options)
    assert contents(store.folder) == before and store.names() == []
    assert import_card(CardStore(tmp_path / "elsewhere"), tmp_path / "it.zip").num_tokens == 10


def test_a_damaged_segment_of_the_store_is_healed(store, tmp_path):
    save(make_manager(), store, 1, 10)
    export_card(store, "card", tmp_path / "it.zip")
    (segment,) = (store.folder / "segments").iterdir()
    segment.write_bytes(segment.read_bytes()[:-1])
    import_card(store, tmp_path / "it.zip", replace=True)
    assert whole_number(store) == 1


def test_what_is_damaged_or_missing_is_not_exported(store, tmp_path):
    save(make_manager(), store, 1, 10)
    (target := tmp_path / "it.zip").write_bytes(b"before")
    with pytest.raises(CardNotFoundError):
        export_card(store, "none", target)
    (segment,) = (store.folder / "segments").iterdir()
    segment.write_bytes(segment.read_bytes()[:-1] + b"x")
    with pytest.raises(CardCorruptError):
        export_card(store, "card", target)
    assert target.read_bytes() == b"before" and sorted(os.listdir(tmp_path)) == ["it.zip", "store"]


def test_an_export_that_cannot_be_written_leaves_what_was_there(store, tmp_path, monkeypatch):
    save(make_manager(), store, 1, 10)
    (target := tmp_path / "it.zip").write_bytes(b"before")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CardWriteError, match="No space left"):
        export_card(store, "card", target)
    monkeypatch.undo()
    assert target.read_bytes() == b"before" and sorted(os.listdir(tmp_path)) == ["it.zip", "store"]
    with pytest.raises(CardWriteError):
        export_card(store, "card", store.folder)


def test_an_import_that_cannot_be_written_leaves_the_store_as_it_was(store, tmp_path, exported, monkeypatch):
    save(make_manager(), store, 1, 10, name="other")
    before = contents(store.folder)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("shutil.copyfileobj", full)
    with pytest.raises(CardWriteError, match="No space left"):
        import_card(store, _file(tmp_path, exported))
    assert contents(store.folder) == before


def test_what_is_no_file_to_read(store, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for name, kind in (("none", CardError), ("", CardFormatError), ("pipe", CardFormatError), ("n\0", CardError)):
        with pytest.raises(kind):
            import_card(store, tmp_path / name)
    with pytest.raises(InvalidValueError, match="name"):
        import_card(store, tmp_path / "none", 3)
    assert contents(store.folder) == {}


# --- damage ------------------------------------------------------------------------------------------


def test_every_flip_and_every_truncation_is_refused(store, tmp_path, exported):
    save(make_manager(), store, 1, 10)
    rng = random.Random(0)
    for _ in range(150):
        data = bytearray(exported)
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        refused(store, tmp_path, bytes(data))
    for length in {0, 1, 21, 22, 53, 54, 55, len(exported) - 1, *rng.sample(range(len(exported)), 60)}:
        refused(store, tmp_path, exported[:length])
    for added in (b"\0", exported):
        refused(store, tmp_path, exported + added)
        refused(store, tmp_path, added + exported)


def test_every_flip_is_refused_even_if_the_digest_is_made_to_fit(store, tmp_path, exported):
    """Then what it says is refused, or it says the same: dates in local headers, which nobody reads."""
    save(make_manager(), store, 1, 10)
    rng, refusals = random.Random(1), 0
    for _ in range(150):
        data = bytearray(exported)
        data[rng.randrange(len(data) - 54)] ^= 1 << rng.randrange(8)
        before = contents(store.folder)
        try:
            import_card(store, _file(tmp_path, signed(bytes(data))), "elsewhere", replace=True)
        except REFUSED:
            refusals += 1
            assert contents(store.folder) == before
        else:
            assert store.verify("elsewhere").num_tokens == 17
    assert refusals >= 140


# --- hostile archives, whose digest holds --------------------------------------------------------------


def test_the_form_of_these_tests_is_ours(store, tmp_path, exported):
    assert made(members_of(exported)) == exported
    assert import_card(store, _file(tmp_path, exported)).num_tokens == 17


NAMES = ["../x", "/etc/x", "segments/../../x", "segments/x", "C:\\x", "segments\\x", "x\0y", "", "card.json/"]
NAMES += ["\u202ex", "\u00e9", "./card.json"]


@pytest.mark.parametrize("name", NAMES)
def test_members_that_are_none_of_ours(store, tmp_path, exported, name):
    (tmp_path / "deep").mkdir()
    card, first, second = members_of(exported)
    for members in (
        [card, first, second, (name, b"x")],
        [(name, b"x"), card, first, second],
        [card, first, (name, second[1])],
        [(name, card[1]), first, second],
    ):
        refused(store, tmp_path / "deep", made(members))
    assert sorted(os.listdir(tmp_path)) == ["deep", "store"] and os.listdir(tmp_path / "deep") == ["it.zip"]


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_members_that_are_missing_twice_there_moved_or_swapped(store, tmp_path, exported):
    card, first, second = members_of(exported)
    wrong = [
        [], [card], [card, first], [first, second], [card, second, first], [first, card, second],
        [card, first, first], [card, first, second, second], [card, card, first, second],
        [card, (first[0], second[1]), (second[0], first[1])],
        [card, first, (second[0], second[1][:-1])],
        [card, first, (second[0], second[1] + b"x")],
        [card, first, (second[0], bytes(len(second[1])))],
        [card, first, (second[0], second[1][:-1] + bytes([second[1][-1] ^ 1]))],
        [card, (first[0], b""), second],
        [("card.json", b"{}"), first, second],
        [("card.json", b"[" * 100_000), first, second],
    ]  # fmt: skip
    for members in wrong:
        refused(store, tmp_path, made(members))


def test_links_folders_devices_secrets_and_what_has_to_be_unpacked(store, tmp_path, exported):
    def kind(mode):
        return lambda info: setattr(info, "external_attr", mode << 16)

    for change in (
        *map(kind, (stat.S_IFLNK | 0o777, stat.S_IFDIR | 0o700, stat.S_IFCHR | 0o600, stat.S_IFREG | 0o4755, 0)),
        lambda info: setattr(info, "create_system", 0),
        lambda info: setattr(info, "date_time", (1999, 1, 1, 0, 0, 0)),
        lambda info: setattr(info, "comment", b"x"),
    ):
        refused(store, tmp_path, made(members_of(exported), change))
    for compression in (zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA):
        refused(store, tmp_path, made(members_of(exported), compression=compression))


def test_a_bomb_is_not_unpacked(store, tmp_path, exported, monkeypatch):
    """A card and a segment of a gigabyte of zeros in a megabyte: refused before a byte is unpacked."""
    card, first, second = members_of(exported)
    bomb = zlib.compressobj(9, zlib.DEFLATED, -15)
    packed = b"".join(bomb.compress(bytes(1 << 24)) for _ in range(8)) + bomb.flush()
    monkeypatch.setattr(zipfile.ZipExtFile, "read", lambda *_: pytest.fail("unpacked"))
    for members in ([("card.json", packed), first, second], [card, ("segments/" + "0" * 32 + ".safetensors", packed)]):
        raw = bytearray(made(members))
        _patch(raw, members.index(next(it for it in members if it[1] is packed)), method=8, size=1 << 27)
        refused(store, tmp_path, signed(bytes(raw)))


def test_sizes_that_are_not_there_are_not_believed(store, tmp_path, exported, monkeypatch):
    for index in range(3):
        for size in (0, 1, 1 << 20, 1 << 30, (1 << 32) - 2):
            if size == 1 << 20:  # from here on told by the sizes alone, before memory is asked for
                monkeypatch.setattr(zipfile.ZipFile, "read", lambda *_: pytest.fail("read"))
            raw = bytearray(exported)
            _patch(raw, index, size=size, packed_size=size)
            refused(store, tmp_path, signed(bytes(raw)))
            raw = bytearray(exported)
            _patch(raw, index, size=size)
            refused(store, tmp_path, signed(bytes(raw)))
        monkeypatch.undo()


def test_members_that_lie_in_one_place_are_refused(store, tmp_path, exported):
    raw = bytearray(exported)
    offsets = [_central(raw, index) for index in range(3)]
    raw[offsets[2] + 42 : offsets[2] + 46] = raw[offsets[1] + 42 : offsets[1] + 46]
    refused(store, tmp_path, signed(bytes(raw)))


def _central(raw: bytes | bytearray, index: int) -> int:
    """Where the central directory speaks of a member."""
    (at,) = struct.unpack_from("<I", raw, len(raw) - 54 + 16)
    for _ in range(index):
        lengths = struct.unpack_from("<3H", raw, at + 28)
        at += 46 + sum(lengths)
    assert raw[at : at + 4] == b"PK\1\2"
    return at


def _patch(raw: bytearray, index: int, *, method=None, size=None, packed_size=None) -> None:
    central = _central(raw, index)
    (local,) = struct.unpack_from("<I", raw, central + 42)
    for value, form, at_central, at_local in (
        (method, "<H", 10, 8),
        (packed_size, "<I", 20, 18),
        (size, "<I", 24, 22),
    ):
        if value is not None:
            struct.pack_into(form, raw, central + at_central, value)
            struct.pack_into(form, raw, local + at_local, value)


class _Marks:
    def __init__(self, path: str):
        self.path = path

    def __reduce__(self):
        return (open, (self.path, "w"))


def test_pickles_and_other_files_are_data(store, tmp_path, exported):
    marker = tmp_path / "marker"
    pickled = pickle.dumps(_Marks(str(marker)))
    mx.save_safetensors(str(tmp_path / "weights.safetensors"), {"a": mx.ones(3)})
    card, first, second = members_of(exported)
    for raw in (
        pickled,
        signed(pickled + bytes(100)),
        made([("card.json", pickled), first, second]),
        made([card, (first[0], pickled), second]),
        made([card, first, second, ("card.pkl", pickled)]),
        (tmp_path / "weights.safetensors").read_bytes(),
        os.urandom(4096),
        signed(os.urandom(4096)),
        signed(b"PK\5\6" + bytes(18) + bytes(32)),
    ):
        refused(store, tmp_path, raw)
    assert not marker.exists()


def test_a_segment_that_the_card_does_not_speak_of_truly(store, tmp_path, exported):
    """The archive is in our form and every digest holds, but the card says other things of its segments."""
    (name, raw), *rest = members_of(exported)
    card = decode(raw, "x")
    first, second = card.segments
    for segments in (
        (dataclasses.replace(first, checksum=second.checksum), second),
        (dataclasses.replace(first, nbytes=5), second),
        (dataclasses.replace(first, start=3), second),
        (first, dataclasses.replace(second, residual_checksum="0" * 32)),
    ):
        forged = dataclasses.replace(card, segments=segments).encoded()
        refused(store, tmp_path, made([(name, forged), *rest]))
    forged = dataclasses.replace(card, quant=dataclasses.replace(card.quant, group_size=64)).encoded()
    refused(store, tmp_path, made([(name, forged), *rest]))


# --- at the same time, and cut ------------------------------------------------------------------------


def test_an_import_that_is_cut_short_by_a_limit_leaves_the_store_as_it_was(store, tmp_path, exported, processes):
    save(make_manager(), store, 1, 10)
    file, before = _file(tmp_path, exported), contents(store.folder)
    largest = max(len(data) for _, data in members_of(exported))
    for limit in (0, 100, largest // 2, largest - 1):
        child = processes.Process(target=store_work.import_under_a_limit, args=(str(store.folder), str(file), limit))
        child.start()
        child.join()
        assert child.exitcode == 0, limit
        assert contents(store.folder) == before
