// Race mode. Kernels are compiled with -fsanitize=thread but linked with this file instead of ThreadSanitizer's
// runtime, so every load and store of theirs is checked here. Whether two accesses are ordered follows from the
// barriers alone: a race is found whatever order the lanes really ran in.
#include "engine.h"

#include <dlfcn.h>
#include <link.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <iterator>

namespace msl {
namespace {

constexpr uint16_t kSeveralThreads = 0xffff, kSeveralSimdgroups = 0xffff;

// Who last touched a byte. `group` is the threadgroup's index plus one; 0: nobody.
struct Access {
  uint32_t group, pc, line;    // pc 0: an atomic operation, known by its line
  Epochs epochs;
  uint16_t thread, simdgroup;
  bool is_atomic() const { return group && !pc; }
};

struct Shadow {
  Access write, read;
  bool initialised;
};

struct Place {  // of the access that is being checked
  const char* name;
  const char* kind;            // "threadgroup variable" or "buffer", for messages
  uint64_t offset;             // bytes into it
  Shadow* shadow;              // null: a buffer that is only read
  Epochs epochs;               // the lane's, of this kind of memory
};

struct Request {
  uintptr_t address;
  uint32_t size, pc, line;     // pc 0: an atomic operation, known by its line
  bool is_read, is_write;
};

Shadow* arena_shadow;
Shadow* buffer_shadow[kMaxArguments];
uintptr_t module_begin, module_end;
uint32_t last_buffer;          // most accesses hit the same buffer again
struct { uint64_t pcs; uint32_t kind; } reported[64];
uint32_t num_reported;

Shadow* map_shadow(size_t bytes) {
  void* memory = mmap(nullptr, sizeof(Shadow) * (bytes + 1), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return static_cast<Shadow*>(memory);
}

int find_module(dl_phdr_info* info, size_t, void*) {
  uintptr_t begin = UINTPTR_MAX, end = 0;
  for (int i = 0; i < info->dlpi_phnum; i++) {
    const auto& segment = info->dlpi_phdr[i];
    if (segment.p_type != PT_LOAD) continue;
    begin = std::min<uintptr_t>(begin, info->dlpi_addr + segment.p_vaddr);
    end = std::max<uintptr_t>(end, info->dlpi_addr + segment.p_vaddr + segment.p_memsz);
  }
  const auto entry = reinterpret_cast<uintptr_t>(&msl_entry);
  if (entry < begin || entry >= end) return 0;
  module_begin = begin, module_end = end;
  return 1;
}

// One report per pair of places in the code, however many bytes and lanes it concerns.
bool is_news(uint32_t kind, const Request& request, uint32_t other_pc = 0) {
  const uint64_t pcs = uint64_t(request.pc + request.line) << 32 | other_pc;
  for (uint32_t i = 0; i < num_reported; i++) {
    if (reported[i].kind == kind && reported[i].pcs == pcs) return false;
  }
  if (num_reported < std::size(reported)) reported[num_reported++] = {pcs, kind};
  return true;
}

const char* verb(const Request& request) { return request.is_write ? "write" : "read"; }

void locate(Fault* fault, const Request& request) {
  if (fault) fault->pc = request.pc, fault->line = request.line;
}

void report_bounds(const Request& request, const char* name, int64_t offset, uint64_t size) {
  if (!is_news(kOutOfBounds, request)) return;
  locate(report(kOutOfBounds, name, "%s of %u bytes at byte %ld of %lu", verb(request), request.size,
                static_cast<long>(offset), static_cast<unsigned long>(size)),
         request);
}

// --------------------------------------------------------------------------------------------- ordering

// Nothing orders threadgroups of one launch. Within one, a barrier of the right kind lies between the accesses
// if the counts differ.
bool is_ordered(const Access& earlier, const Lane& self, const Epochs& epochs) {
  if (earlier.group != engine.threadgroup_index + 1) return false;
  if (earlier.thread == self.thread) return true;
  if (earlier.epochs.threadgroup_barriers < epochs.threadgroup_barriers) return true;
  return earlier.simdgroup == self.simdgroup && earlier.epochs.simdgroup_barriers < epochs.simdgroup_barriers;
}

void report_race(const Request& request, const Place& place, const Access& other, const char* other_verb) {
  if (!is_news(kDataRace, request, other.pc + other.line)) return;
  const bool same_group = other.group == engine.threadgroup_index + 1;
  const char* who = !same_group ? "threadgroup" : other.thread == kSeveralThreads ? "several threads" : "thread";
  const long number = !same_group ? long(other.group) - 1 : other.thread == kSeveralThreads ? -1 : other.thread;
  char whom[48];
  snprintf(whom, sizeof whom, number < 0 ? "%s" : "%s %ld", who, number);
  Fault* fault = report(kDataRace, place.name, "%s of byte %lu of the %s is not ordered with the %s by %s",
                        verb(request), static_cast<unsigned long>(place.offset), place.kind, other_verb, whom);
  locate(fault, request);
  if (fault) fault->other_pc = other.pc, fault->other_line = other.line;
}

void note_read(Access& read, const Access& mine) {
  const bool joins = read.group == mine.group && read.thread != mine.thread &&
                     read.epochs.threadgroup_barriers == mine.epochs.threadgroup_barriers;
  const uint16_t simdgroup = joins && read.simdgroup != mine.simdgroup ? kSeveralSimdgroups : mine.simdgroup;
  read = mine;
  read.simdgroup = simdgroup;
  if (joins) read.thread = kSeveralThreads;
}

// Atomic operations do not race with each other.
bool is_race(const Request& request, const Access& earlier, const Epochs& epochs) {
  if (!earlier.group || (!request.pc && earlier.is_atomic())) return false;
  return !is_ordered(earlier, *engine.current, epochs);
}

void check_byte(const Request& request, const Place& place, Shadow& shadow) {
  const Lane& self = *engine.current;
  const Access mine = {engine.threadgroup_index + 1, request.pc, request.line, place.epochs,
                       static_cast<uint16_t>(self.thread), static_cast<uint16_t>(self.simdgroup)};
  if (is_race(request, shadow.write, place.epochs)) report_race(request, place, shadow.write, "write");
  if (request.is_write && is_race(request, shadow.read, place.epochs)) {
    report_race(request, place, shadow.read, "read");
  }
  if (request.is_read && !shadow.initialised && is_news(kUninitialisedRead, request)) {
    locate(report(kUninitialisedRead, place.name, "read of byte %lu of the %s, which nothing has written",
                  static_cast<unsigned long>(place.offset), place.kind),
           request);
  }
  if (request.is_write) {
    shadow.initialised = true;
    shadow.write = mine;
  } else {
    note_read(shadow.read, mine);
  }
}

// ---------------------------------------------------------------------------------------------- places

bool is_own_memory(uintptr_t address, bool is_write) {
  const Lane* lanes = engine.lanes;
  const auto first = reinterpret_cast<uintptr_t>(lanes[0].stack);
  const auto last = reinterpret_cast<uintptr_t>(lanes[engine.num_lanes - 1].stack) + kStackBytes;
  if (address >= first && address < last) return true;
  const auto exchange = reinterpret_cast<uintptr_t>(engine.simdgroups);
  if (address >= exchange && address < exchange + sizeof(Simdgroup) * engine.num_simdgroups) return true;
  return !is_write && address >= module_begin && address < module_end;  // constant tables
}

bool find_in_arena(const Request& request, Place& place) {
  const ThreadgroupVariable* variable = variable_at(request.address);
  const size_t offset = request.address - reinterpret_cast<uintptr_t>(engine.arena);
  if (!variable || variable_at(request.address + request.size - 1) != variable) {
    const ThreadgroupVariable* nearest = nearest_variable(request.address);
    report_bounds(request, nearest ? nearest->name : "threadgroup memory",
                  nearest ? int64_t(offset) - int64_t(nearest->offset) : int64_t(offset), nearest ? nearest->size : 0);
    return false;
  }
  if (request.is_read) engine.launch->threadgroup_bytes_read += request.size;
  if (request.is_write) engine.launch->threadgroup_bytes_written += request.size;
  place = {variable->name, "threadgroup variable", offset - variable->offset, arena_shadow + offset,
           engine.current->threadgroup_epochs};
  return true;
}

bool holds(const Buffer& buffer, uintptr_t address) {
  return address - reinterpret_cast<uintptr_t>(buffer.data) < buffer.size;
}

Buffer* find_buffer(uintptr_t address) {
  Launch& launch = *engine.launch;
  if (last_buffer < launch.num_buffers && holds(launch.buffers[last_buffer], address)) {
    return &launch.buffers[last_buffer];
  }
  for (uint32_t i = 0; i < launch.num_buffers; i++) {
    if (holds(launch.buffers[i], address)) return &launch.buffers[last_buffer = i];
  }
  return nullptr;
}

bool find_in_buffers(const Request& request, Place& place) {
  Buffer* buffer = find_buffer(request.address);
  if (!buffer || !holds(*buffer, request.address + request.size - 1)) {
    int64_t offset = 0;
    const Buffer* nearest = nearest_buffer(request.address, &offset);
    report_bounds(request, nearest ? nearest->name : "", offset, nearest ? nearest->size : 0);
    stop();
    return false;
  }
  const uint64_t offset = request.address - reinterpret_cast<uintptr_t>(buffer->data);
  if (request.is_read) buffer->bytes_read += request.size;
  if (request.is_write) buffer->bytes_written += request.size;
  if (request.address % request.size && is_news(kMisaligned, request)) {
    locate(report(kMisaligned, buffer->name, "%s of %u bytes at byte %lu", verb(request), request.size,
                  static_cast<unsigned long>(offset)),
           request);
  }
  if (request.is_write && !buffer->writable && is_news(kWriteToInput, request)) {
    locate(report(kWriteToInput, buffer->name, "write to byte %lu", static_cast<unsigned long>(offset)), request);
  }
  Shadow* shadow = buffer_shadow[buffer - engine.launch->buffers];
  place = {buffer->name, "buffer", offset, shadow ? shadow + offset : nullptr, engine.current->device_epochs};
  return true;
}

void check(const Request& request) {
  if (!engine.current || is_own_memory(request.address, request.is_write)) return;
  Place place;
  const bool in_arena = request.address - reinterpret_cast<uintptr_t>(engine.arena) < kArenaBytes;
  if (!(in_arena ? find_in_arena(request, place) : find_in_buffers(request, place)) || !place.shadow) return;
  for (uint32_t i = 0; i < request.size; i++, place.offset++) check_byte(request, place, place.shadow[i]);
}

void access(const void* address, uint32_t size, bool is_write, const void* caller) {
  const auto pc = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(caller) - 1 - module_begin);
  check({reinterpret_cast<uintptr_t>(address), size, pc, 0, !is_write, is_write});
}

// Block copies, in the largest aligned pieces.
void access_span(const void* address, size_t size, bool is_write, const void* caller) {
  auto position = reinterpret_cast<uintptr_t>(address);
  while (size) {
    const uint32_t piece = size >= 16 && position % 16 == 0 ? 16 : size >= 4 && position % 4 == 0 ? 4 : 1;
    access(reinterpret_cast<void*>(position), piece, is_write, caller);
    position += piece, size -= piece;
  }
}

void report_unwritten(const Buffer& buffer, const Shadow* shadow) {
  uint64_t missing = 0, first = 0;
  for (uint64_t i = 0; i < buffer.size; i++) {
    if (shadow[i].initialised) continue;
    if (!missing++) first = i;
  }
  if (!missing) return;
  report(kUnwrittenOutput, buffer.name, "%lu of %lu bytes were never written, the first is byte %lu",
         static_cast<unsigned long>(missing), static_cast<unsigned long>(buffer.size),
         static_cast<unsigned long>(first));
}

}  // namespace

void memcheck_begin_launch() {
  dl_iterate_phdr(find_module, nullptr);
  num_reported = last_buffer = 0;
  arena_shadow = map_shadow(kArenaBytes);
  for (uint32_t i = 0; i < engine.launch->num_buffers; i++) {
    const Buffer& buffer = engine.launch->buffers[i];
    buffer_shadow[i] = buffer.writable ? map_shadow(buffer.size) : nullptr;
    if (!buffer.writable || !buffer.initialised) continue;
    for (uint64_t k = 0; k < buffer.size; k++) buffer_shadow[i][k].initialised = true;
  }
}

// Forgets what the threadgroup before did to its own memory.
void memcheck_begin_threadgroup() { memset(arena_shadow, 0, sizeof(Shadow) * engine.arena_top); }

void memcheck_end_launch() {
  munmap(arena_shadow, sizeof(Shadow) * (kArenaBytes + 1));
  for (uint32_t i = 0; i < engine.launch->num_buffers; i++) {
    const Buffer& buffer = engine.launch->buffers[i];
    if (!buffer.writable) continue;
    if (!engine.stopped) report_unwritten(buffer, buffer_shadow[i]);
    munmap(buffer_shadow[i], sizeof(Shadow) * (buffer.size + 1));
  }
}

}  // namespace msl

// ------------------------------------------------------- what -fsanitize=thread makes kernel code call

#define CALLER __builtin_return_address(0)
#define HOOKS(size)                                                                                       \
  void __tsan_read##size(void* p) { msl::access(p, size, false, CALLER); }                                \
  void __tsan_write##size(void* p) { msl::access(p, size, true, CALLER); }                                \
  void __tsan_unaligned_read##size(void* p) { msl::access(p, size, false, CALLER); }                      \
  void __tsan_unaligned_write##size(void* p) { msl::access(p, size, true, CALLER); }                      \
  void __tsan_volatile_read##size(void* p) { msl::access(p, size, false, CALLER); }                       \
  void __tsan_volatile_write##size(void* p) { msl::access(p, size, true, CALLER); }                       \
  void __tsan_read_write##size(void* p) {                                                                 \
    msl::access(p, size, false, CALLER);                                                                  \
    msl::access(p, size, true, CALLER);                                                                   \
  }                                                                                                       \
  void __tsan_unaligned_read_write##size(void* p) {                                                       \
    msl::access(p, size, false, CALLER);                                                                  \
    msl::access(p, size, true, CALLER);                                                                   \
  }

extern "C" {
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
HOOKS(1) HOOKS(2) HOOKS(4) HOOKS(8) HOOKS(16)

void* __tsan_memcpy(void* to, const void* from, size_t size) {
  msl::access_span(from, size, false, CALLER);
  msl::access_span(to, size, true, CALLER);
  return memcpy(to, from, size);
}
void* __tsan_memmove(void* to, const void* from, size_t size) {
  msl::access_span(from, size, false, CALLER);
  msl::access_span(to, size, true, CALLER);
  return memmove(to, from, size);
}
void* __tsan_memset(void* to, int value, size_t size) {
  msl::access_span(to, size, true, CALLER);
  return memset(to, value, size);
}
// The shim's atomics are not instrumented: they call this.
void __msl_atomic(size_t address, uint32_t size, bool is_read, bool is_write, uint32_t line) {
  msl::check({address, size, 0, line, is_read, is_write});
}
}
