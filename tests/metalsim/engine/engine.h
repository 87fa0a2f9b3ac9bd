// A Metal dispatch on one CPU thread: one fiber per Metal thread ("lane"), run until a simdgroup operation,
// a barrier or its end. The structs up to `Launch` are mirrored field by field in dispatch.py.
#pragma once
#include <cstddef>
#include <cstdint>

#if __has_feature(address_sanitizer)
#define WITH_ASAN 1
#else
#define WITH_ASAN 0
#endif

namespace msl {

constexpr uint32_t kSimdWidth = 32;
constexpr uint32_t kMaxThreads = 1024;             // Metal's limit per threadgroup
constexpr uint32_t kMaxThreadgroupBytes = 32768;   // Metal's limit on threadgroup memory
constexpr uint32_t kMaxVariables = 64;             // threadgroup variables of one kernel
constexpr uint32_t kMaxArguments = 64;
constexpr uint32_t kMaxFaults = 16;
constexpr size_t kRedZone = 64;                    // bytes between threadgroup variables
constexpr size_t kArenaBytes = 256 * 1024;
constexpr size_t kStackBytes = 256 * 1024;
constexpr uint32_t kMemDevice = 1, kMemThreadgroup = 2;  // metal::mem_flags

enum FaultKind : uint32_t {
  kOutOfBounds, kDataRace, kDivergence, kUninitialisedRead, kUnwrittenOutput, kWriteToInput,
  kMisaligned, kOverLimit, kInactiveLane, kTimeout, kSanitizer,
};

struct Fault {
  uint32_t kind, has_thread;
  uint64_t pc, other_pc;       // offsets into the kernel's library; 0 if unknown
  uint32_t line, other_line;   // where pc is unknown; 0 if that is too
  uint32_t threadgroup[3], thread;
  char variable[64], detail[192];
};

struct Buffer {
  uint8_t* data;               // lowest byte that the kernel may touch
  uint64_t size, origin;       // bytes; the kernel's pointer is data + origin
  uint32_t index, writable, initialised, reserved;
  uint64_t bytes_read, bytes_written;  // race mode only
  char name[64];
};

enum Policy : uint32_t { kFifo, kRandomLane, kRandomSimdgroup };

struct Launch {
  uint32_t grid[3], threadgroup[3];
  uint32_t policy, flush_denormals, num_buffers, cpu_seconds;  // cpu_seconds: the watchdog's patience
  uint64_t seed;
  Buffer* buffers;
  // Results. Counts are of the whole launch, threadgroup_bytes of one threadgroup.
  uint64_t barriers, simd_ops, switches, threadgroups, threadgroup_bytes;
  uint64_t threadgroup_bytes_read, threadgroup_bytes_written;  // race mode only
  uint32_t num_faults, finished;
  Fault faults[kMaxFaults];
};

// What the generated entry point reads the built-in arguments from; the shim declares the same layout.
struct Context {
  uint32_t thread_position_in_grid[3], thread_position_in_threadgroup[3], threadgroup_position_in_grid[3];
  uint32_t threadgroups_per_grid[3], threads_per_grid[3], threads_per_threadgroup[3];
  uint32_t dispatch_threads_per_threadgroup[3], grid_size[3], grid_origin[3];
  uint32_t thread_index_in_threadgroup, thread_index_in_simdgroup, simdgroup_index_in_threadgroup;
  uint32_t simdgroups_per_threadgroup, dispatch_simdgroups_per_threadgroup;
  uint32_t thread_execution_width, threads_per_simdgroup;
  uint32_t thread_index_in_quadgroup, quadgroup_index_in_threadgroup, quadgroups_per_threadgroup;
  uint32_t dispatch_quadgroups_per_threadgroup;
};

// Values that lanes exchange in one simdgroup operation; the shim declares the same layout.
struct alignas(64) Exchange {
  uint32_t mask, padding[15];
  char result[64], slots[kSimdWidth * 64];
};

enum class LaneState : uint8_t { kReady, kAtSimdOp, kAtBarrier, kDone };

// How many barriers that cover a kind of memory a lane has passed: equal counts mean "not ordered".
struct Epochs {
  uint32_t threadgroup_barriers, simdgroup_barriers;
};

struct Lane {
  void* stack_pointer;
  char* stack;
  uint32_t thread, simdgroup, lane, site;
  LaneState state;
  bool completes_op;           // woken to finish an operation whose last missing lane has returned
  Epochs device_epochs, threadgroup_epochs;
  Context context;
};

struct Simdgroup {
  Exchange exchange[2];        // two, so that a fast lane cannot overwrite what a slow one still reads
  uint32_t phase, arrived, live, width, site, operation, value_size;
};

struct ThreadgroupVariable {
  uint32_t id;
  size_t offset, size;
  const char* name;
};

struct Engine {
  Launch* launch;
  Lane* lanes;
  Simdgroup* simdgroups;
  Lane* current;
  uint32_t num_lanes, num_live, num_simdgroups, threadgroup_index;
  uint8_t* arena;              // threadgroup memory
  size_t arena_top;
  ThreadgroupVariable variables[kMaxVariables];
  uint32_t num_variables;
  bool stopped;                // after a fault that leaves nothing sensible to run
};

extern Engine engine;

// Adds a fault and returns it for more detail; null when the list is full.
Fault* report(FaultKind kind, const char* variable, const char* format, ...) __attribute__((format(printf, 3, 4)));
// Ends the launch from inside a lane.
void stop();

// The scheduler (engine.cpp), as launch.cpp uses it for each threadgroup.
void seed_scheduler(uint64_t seed);
void forget_lanes();
void prepare_fiber(Lane& lane, char* stack);
void make_ready(Lane* lane);
void run_lanes();              // returns when all have ended, or the launch is stopped

uint64_t module_offset(const void* address);
const Buffer* nearest_buffer(uintptr_t address, int64_t* offset);
const ThreadgroupVariable* variable_at(uintptr_t address);
const ThreadgroupVariable* nearest_variable(uintptr_t address);

// Race mode (memcheck.cpp); empty without it.
void memcheck_begin_launch();
void memcheck_begin_threadgroup();  // before engine.arena_top is reset
void memcheck_end_launch();

}  // namespace msl

extern "C" {
void msl_entry(const uint64_t* arguments, const msl::Context* context);  // generated, see frontend.py
int msl_launch(msl::Launch* launch);
uint64_t msl_struct_sizes();
const char* msl_name_of(uintptr_t address, int64_t* offset);
}
