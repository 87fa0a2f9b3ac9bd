// Runs one launch in a process of its own, where AddressSanitizer can be the first to map memory.
//   runner KERNEL.so FILE
// FILE holds a Launch, its Buffers, and the bytes of each buffer; it is overwritten with the same after the run.
#include <dlfcn.h>
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "engine.h"

using msl::Buffer;
using msl::Fault;
using msl::Launch;

static Launch launch;
static std::vector<Buffer> buffers;
static const char* path;
static const char* (*name_of)(uintptr_t address, int64_t* offset);

static bool load() {
  FILE* file = fopen(path, "rb");
  if (!file || fread(&launch, sizeof launch, 1, file) != 1) return false;
  buffers.resize(launch.num_buffers);
  bool complete = fread(buffers.data(), sizeof(Buffer), buffers.size(), file) == buffers.size();
  for (Buffer& buffer : buffers) {
    void* memory = nullptr;
    // Exactly as long as the data, so that the red zone begins with the first byte past it.
    complete = complete && !posix_memalign(&memory, 16, buffer.size ? buffer.size : 1);
    complete = complete && fread(memory, 1, buffer.size, file) == buffer.size;
    buffer.data = static_cast<uint8_t*>(memory);
  }
  fclose(file);
  launch.buffers = buffers.data();
  return complete;
}

static void save() {
  FILE* file = fopen(path, "wb");
  if (!file) return;
  fwrite(&launch, sizeof launch, 1, file);
  fwrite(buffers.data(), sizeof(Buffer), buffers.size(), file);
  for (const Buffer& buffer : buffers) fwrite(buffer.data, 1, buffer.size, file);
  fclose(file);
}

static void on_death() {
  if (__asan_report_present() && launch.num_faults < msl::kMaxFaults) {
    Fault& fault = launch.faults[launch.num_faults++];
    fault = Fault{};
    int64_t offset = 0;
    const char* name = name_of(reinterpret_cast<uintptr_t>(__asan_get_report_address()), &offset);
    const char* description = __asan_get_report_description();
    const bool is_bounds = strstr(description, "overflow") || strstr(description, "poison");
    fault.kind = is_bounds ? msl::kOutOfBounds : msl::kSanitizer;
    snprintf(fault.variable, sizeof fault.variable, "%s", name);
    snprintf(fault.detail, sizeof fault.detail, "%s: %s of %zu bytes", description,
             __asan_get_report_access_type() ? "write" : "read", __asan_get_report_access_size());
    Dl_info info;
    // A return address: the call that it returns from belongs to the access.
    const uintptr_t pc = reinterpret_cast<uintptr_t>(__asan_get_report_pc()) - 1;
    if (dladdr(reinterpret_cast<void*>(pc), &info)) fault.pc = pc - reinterpret_cast<uintptr_t>(info.dli_fbase);
    if (*name) snprintf(fault.detail + strlen(fault.detail), 48, " at byte %ld", static_cast<long>(offset));
  }
  save();
}

int main(int count, char** arguments) {
  if (count != 3) return 2;
  path = arguments[2];
  if (!load()) return 2;
  void* library = dlopen(arguments[1], RTLD_NOW);
  if (!library) {
    fprintf(stderr, "%s\n", dlerror());
    return 2;
  }
  name_of = reinterpret_cast<decltype(name_of)>(dlsym(library, "msl_name_of"));
  __sanitizer_set_death_callback(on_death);
  reinterpret_cast<int (*)(Launch*)>(dlsym(library, "msl_launch"))(&launch);
  save();
  return 0;
}
