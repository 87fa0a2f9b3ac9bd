// Runs a whole grid: memory for lanes, threadgroups one after the other, and the handler of memory faults.
#include <immintrin.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <numeric>

#include "engine.h"

#if WITH_ASAN
#include <sanitizer/asan_interface.h>
#endif

namespace msl {

__attribute__((weak)) void memcheck_begin_launch() {}
__attribute__((weak)) void memcheck_begin_threadgroup() {}
__attribute__((weak)) void memcheck_end_launch() {}

namespace {

constexpr size_t kPage = 4096;
constexpr size_t kStackStride = kStackBytes + kPage;  // the first page of each is a guard

sigjmp_buf escape;
volatile bool launching;

// Memory faults and the watchdog arrive as signals on a lane's stack; the launch ends with a report.
void on_signal(int number, siginfo_t* info, void* machine) {
  if (!launching) {
    signal(number, SIG_DFL);
    return;
  }
  const auto pc = reinterpret_cast<void*>(static_cast<ucontext_t*>(machine)->uc_mcontext.gregs[REG_RIP]);
  const auto address = reinterpret_cast<uintptr_t>(info->si_addr);
  Fault* fault;
  int64_t offset = 0;
  const Buffer* buffer = nearest_buffer(address, &offset);
  const char* name = buffer ? buffer->name : "";
  const auto stack = engine.current ? reinterpret_cast<uintptr_t>(engine.current->stack) : 0;
  if (number == SIGVTALRM) {
    fault = report(kTimeout, "", "still running after %u s of CPU time", engine.launch->cpu_seconds);
  } else if (info->si_code == SI_KERNEL) {  // no address: a vector instruction that needs alignment
    fault = report(kMisaligned, "", "vector access to a misaligned address");
  } else if (address < stack && address >= stack - kPage) {
    fault = report(kOverLimit, "", "the thread's private memory exceeds %zu KiB", kStackBytes / 1024);
  } else if (buffer && address - reinterpret_cast<uintptr_t>(buffer->data) < buffer->size) {
    fault = report(kWriteToInput, name, "write to byte %ld", static_cast<long>(offset));  // mapped read-only
  } else {
    fault = report(kOutOfBounds, name, "fault at byte %ld of %lu", static_cast<long>(offset),
                   buffer ? static_cast<unsigned long>(buffer->size) : 0ul);
  }
  if (fault) {
    fault->pc = module_offset(pc);
    fault->line = engine.current ? engine.current->site : 0;  // its last operation, if pc lies in the engine
  }
  siglongjmp(escape, 1);
}

class SignalScope {
 public:
  explicit SignalScope(uint32_t cpu_seconds) {
    if (WITH_ASAN) return;  // AddressSanitizer reports faults itself, the driver limits the time
    stack_t stack{};
    stack.ss_sp = stack_;
    stack.ss_size = sizeof stack_;
    sigaltstack(&stack, &old_stack_);
    struct sigaction action{};
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    for (int i = 0; i < 3; i++) sigaction(kSignals[i], &action, &old_actions_[i]);
    set_timer(cpu_seconds);
  }
  ~SignalScope() {
    if (WITH_ASAN) return;
    set_timer(0);
    for (int i = 0; i < 3; i++) sigaction(kSignals[i], &old_actions_[i], nullptr);
    sigaltstack(&old_stack_, nullptr);
  }

 private:
  static constexpr int kSignals[3] = {SIGSEGV, SIGBUS, SIGVTALRM};
  static void set_timer(uint32_t seconds) {
    itimerval timer{};
    timer.it_value.tv_sec = seconds;
    setitimer(ITIMER_VIRTUAL, &timer, nullptr);
  }
  char stack_[64 * 1024];
  stack_t old_stack_{};
  struct sigaction old_actions_[3]{};
};

class Mapping {
 public:
  explicit Mapping(size_t size) : size_(size) {
    data_ = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (data_ == MAP_FAILED) abort();
  }
  ~Mapping() {
#if WITH_ASAN
    __asan_unpoison_memory_region(data_, size_);
#endif
    munmap(data_, size_);
  }
  char* data() const { return static_cast<char*>(data_); }

 private:
  void* data_;
  size_t size_;
};

void copy3(uint32_t* to, const uint32_t* from) { memcpy(to, from, 3 * sizeof *to); }

// `size`: threads of this threadgroup, `full`: of those not cut off by the end of the grid.
void fill_context(Lane& lane, const uint32_t* group, const uint32_t* groups, const uint32_t* size,
                  const uint32_t* full) {
  const Launch& launch = *engine.launch;
  const uint32_t i = lane.thread;
  const uint32_t position[3] = {i % size[0], i / size[0] % size[1], i / (size[0] * size[1])};
  Context& context = lane.context;
  context = Context{};
  for (int k = 0; k < 3; k++) context.thread_position_in_grid[k] = group[k] * full[k] + position[k];
  copy3(context.thread_position_in_threadgroup, position);
  copy3(context.threadgroup_position_in_grid, group);
  copy3(context.threadgroups_per_grid, groups);
  copy3(context.threads_per_grid, launch.grid);
  copy3(context.grid_size, launch.grid);
  copy3(context.threads_per_threadgroup, size);
  copy3(context.dispatch_threads_per_threadgroup, full);
  const uint32_t full_threads = full[0] * full[1] * full[2];
  context.thread_index_in_threadgroup = i;
  context.thread_index_in_simdgroup = lane.lane;
  context.simdgroup_index_in_threadgroup = lane.simdgroup;
  context.simdgroups_per_threadgroup = engine.num_simdgroups;
  context.dispatch_simdgroups_per_threadgroup = (full_threads + kSimdWidth - 1) / kSimdWidth;
  context.thread_execution_width = context.threads_per_simdgroup = kSimdWidth;
  context.thread_index_in_quadgroup = i % 4;
  context.quadgroup_index_in_threadgroup = i / 4;
  context.quadgroups_per_threadgroup = (engine.num_lanes + 3) / 4;
  context.dispatch_quadgroups_per_threadgroup = (full_threads + 3) / 4;
}

void prepare_threadgroup(const uint32_t* group, const uint32_t* groups, const uint32_t* full, char* stacks) {
  uint32_t size[3];
  for (int k = 0; k < 3; k++) size[k] = std::min(full[k], engine.launch->grid[k] - group[k] * full[k]);
  engine.num_lanes = engine.num_live = size[0] * size[1] * size[2];
  engine.num_simdgroups = (engine.num_lanes + kSimdWidth - 1) / kSimdWidth;
  memcheck_begin_threadgroup();
  engine.arena_top = kRedZone;
  engine.num_variables = 0;
  engine.launch->threadgroup_bytes = 0;
  engine.launch->threadgroups++;
  forget_lanes();
#if WITH_ASAN
  __asan_poison_memory_region(engine.arena, kArenaBytes);
#endif
  for (uint32_t i = 0; i < engine.num_simdgroups; i++) {
    Simdgroup& simdgroup = engine.simdgroups[i];
    simdgroup.phase = simdgroup.arrived = 0;
    simdgroup.width = simdgroup.live = std::min(kSimdWidth, engine.num_lanes - i * kSimdWidth);
  }
  for (uint32_t i = 0; i < engine.num_lanes; i++) {
    Lane& lane = engine.lanes[i];
    lane.thread = i;
    lane.simdgroup = i / kSimdWidth;
    lane.lane = i % kSimdWidth;
    lane.completes_op = false;
    lane.device_epochs = lane.threadgroup_epochs = {1, 1};
    fill_context(lane, group, groups, size, full);
    prepare_fiber(lane, stacks + kStackStride * i + kPage);
    make_ready(&lane);
  }
}

void run_threadgroups(const uint32_t* groups, const uint32_t* full, char* stacks) {
  const Launch& launch = *engine.launch;
  const uint64_t total = uint64_t(groups[0]) * groups[1] * groups[2];
  // A step coprime to the total visits every threadgroup once, in another order.
  uint64_t step = launch.policy == kFifo ? 1 : std::max<uint64_t>(1, 2654435761u % total);
  if (std::gcd(step, total) != 1) step = 1;
  const uint64_t first = launch.policy == kFifo ? 0 : launch.seed % total;
  for (uint64_t i = 0; i < total && !engine.stopped; i++) {
    const uint64_t index = (first + i * step) % total;
    const uint32_t group[3] = {static_cast<uint32_t>(index % groups[0]),
                               static_cast<uint32_t>(index / groups[0] % groups[1]),
                               static_cast<uint32_t>(index / (uint64_t(groups[0]) * groups[1]))};
    engine.threadgroup_index = static_cast<uint32_t>(index);
    prepare_threadgroup(group, groups, full, stacks);
    run_lanes();
  }
}

void run_grid(const uint32_t* full, uint32_t num_threads) {
  const Launch& launch = *engine.launch;
  uint32_t groups[3];
  for (int k = 0; k < 3; k++) groups[k] = (launch.grid[k] + full[k] - 1) / full[k];
  const Mapping stacks(kStackStride * num_threads), arena(kArenaBytes);
  const Mapping lanes(sizeof(Lane) * num_threads);
  const Mapping simdgroups(sizeof(Simdgroup) * ((num_threads + kSimdWidth - 1) / kSimdWidth));
  for (uint32_t i = 0; i < num_threads; i++) mprotect(stacks.data() + kStackStride * i, kPage, PROT_NONE);
  engine.lanes = reinterpret_cast<Lane*>(lanes.data());
  engine.simdgroups = reinterpret_cast<Simdgroup*>(simdgroups.data());
  engine.arena = reinterpret_cast<uint8_t*>(arena.data());
  memcheck_begin_launch();
  {
    const SignalScope signals(launch.cpu_seconds);
    launching = true;
    if (sigsetjmp(escape, 1) == 0) {
      run_threadgroups(groups, full, stacks.data());
    } else {
      engine.stopped = true;
    }
    launching = false;
  }
  engine.current = nullptr;
  memcheck_end_launch();
}

}  // namespace
}  // namespace msl

// For the driver, to see that its structs are these.
extern "C" uint64_t msl_struct_sizes() { return sizeof(msl::Launch) + sizeof(msl::Buffer); }

// Runs the whole grid. Returns the number of faults.
extern "C" int msl_launch(msl::Launch* launch) {
  using namespace msl;
  constexpr unsigned kFlushDenormals = 0x8040;  // FTZ and DAZ, as Metal on float32
  engine = Engine{};
  engine.launch = launch;
  seed_scheduler(launch->seed);
  launch->barriers = launch->simd_ops = launch->switches = launch->threadgroups = 0;
  launch->num_faults = launch->finished = 0;
  uint32_t full[3];
  for (int k = 0; k < 3; k++) full[k] = std::min(launch->threadgroup[k], launch->grid[k]);
  const uint64_t num_threads = uint64_t(full[0]) * full[1] * full[2];
  if (num_threads > kMaxThreads) {
    report(kOverLimit, "threadgroup", "%lu threads in a threadgroup, Metal allows %u",
           static_cast<unsigned long>(num_threads), kMaxThreads);
    return 1;
  }
  const unsigned control = _mm_getcsr();
  if (launch->flush_denormals) _mm_setcsr(control | kFlushDenormals);
  if (num_threads) run_grid(full, static_cast<uint32_t>(num_threads));
  _mm_setcsr(control);
  launch->finished = 1;
  return static_cast<int>(launch->num_faults);
}
