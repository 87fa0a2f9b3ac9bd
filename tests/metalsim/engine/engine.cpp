// Fibers, the scheduler, and what the shim calls: barriers, simdgroup operations, threadgroup memory.
#include "engine.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#if WITH_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace msl {

Engine engine;

namespace {

void* scheduler_stack_pointer;
std::vector<Lane*> ready;
size_t ready_head;
uint64_t random_state;
uint32_t sticky_simdgroup;
struct { uint32_t arrived, site, flags; } barrier;

uint64_t next_random() {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  return random_state ^= random_state << 17;
}

}  // namespace

void make_ready(Lane* lane) {
  lane->state = LaneState::kReady;
  ready.push_back(lane);
}

static void report_at_line(FaultKind kind, uint32_t line, const char* detail) {
  if (Fault* fault = report(kind, "", "%s", detail)) fault->line = line;
}

// ---------------------------------------------------------------------------------------------- fibers

// Saves the callee-saved registers and the stack pointer of one fiber and restores those of another.
extern "C" void msl_swap_stacks(void** save, void* load);
asm(R"(
.text
.globl msl_swap_stacks
.type msl_swap_stacks,@function
msl_swap_stacks:
  pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
  ret
)");

namespace {

#if WITH_ASAN
const void* scheduler_stack;
size_t scheduler_stack_size;

void announce_switch(Lane* target, bool for_good, void** fake_stack) {
  const void* bottom = target ? target->stack : scheduler_stack;
  __sanitizer_start_switch_fiber(for_good ? nullptr : fake_stack, bottom, target ? kStackBytes : scheduler_stack_size);
}

void finish_switch(void* fake_stack, bool first_lane) {
  const void* bottom;
  size_t size;
  __sanitizer_finish_switch_fiber(fake_stack, &bottom, &size);
  if (first_lane) scheduler_stack = bottom, scheduler_stack_size = size;
}
#else
void announce_switch(Lane*, bool, void**) {}
void finish_switch(void*, bool) {}
#endif

bool first_lane_starts;

// Runs `target` (null: the scheduler of threadgroups) until something switches back to the caller.
void switch_to(Lane* target, void** save, bool for_good = false) {
  void* fake_stack = nullptr;
  announce_switch(target, for_good, &fake_stack);
  msl_swap_stacks(save, target ? target->stack_pointer : scheduler_stack_pointer);
  finish_switch(fake_stack, false);
}

Lane* take_ready(size_t position) {
  Lane* lane = ready[position];
  if (position == ready_head) {
    ready_head++;
  } else {
    ready[position] = ready.back();
    ready.pop_back();
  }
  if (ready_head == ready.size()) ready.clear(), ready_head = 0;
  return lane;
}

size_t random_position() { return ready_head + next_random() % (ready.size() - ready_head); }

Lane* choose_lane() {
  if (engine.launch->policy == kFifo) return take_ready(ready_head);
  if (engine.launch->policy == kRandomLane) return take_ready(random_position());
  // One simdgroup runs as far ahead of the others as it can.
  for (size_t i = ready_head; i < ready.size(); i++) {
    if (ready[i]->simdgroup == sticky_simdgroup) return take_ready(i);
  }
  Lane* lane = take_ready(random_position());
  sticky_simdgroup = lane->simdgroup;
  return lane;
}

void report_deadlock() {
  uint32_t at_barrier = 0, at_simd_op = 0, returned = 0, barrier_line = 0, simd_line = 0;
  for (uint32_t i = 0; i < engine.num_lanes; i++) {
    const Lane& lane = engine.lanes[i];
    if (lane.state == LaneState::kAtBarrier) at_barrier++, barrier_line = lane.site;
    if (lane.state == LaneState::kAtSimdOp) at_simd_op++, simd_line = lane.site;
    if (lane.state == LaneState::kDone) returned++;
  }
  char detail[160];
  int used = snprintf(detail, sizeof detail, "%u threads have returned", returned);
  if (at_barrier) {
    used += snprintf(detail + used, sizeof detail - used, ", %u wait at the threadgroup_barrier of line %u", at_barrier,
                     barrier_line);
  }
  if (at_simd_op) {
    snprintf(detail + used, sizeof detail - used, ", %u wait at the simdgroup operation of line %u", at_simd_op,
             simd_line);
  }
  report_at_line(kDivergence, barrier_line ? barrier_line : simd_line, detail);
}

// Gives up the CPU; the current lane has already noted what it waits for.
void run_next(bool for_good = false) {
  Lane* self = engine.current;
  engine.launch->switches++;
  if (ready_head == ready.size()) {
    if (engine.num_live) report_deadlock(), engine.stopped = true;
    engine.current = nullptr;
    switch_to(nullptr, &self->stack_pointer, for_good);
    return;
  }
  Lane* target = choose_lane();
  engine.current = target;
  if (target != self) switch_to(target, &self->stack_pointer, for_good);
}

void leave_lane(Lane* self) {
  self->state = LaneState::kDone;
  engine.num_live--;
  Simdgroup& group = engine.simdgroups[self->simdgroup];
  group.live--;
  if (!group.arrived || group.arrived != group.live) return;
  // The lanes that wait are now all there are: one of them completes the operation.
  for (uint32_t i = 0; i < group.width; i++) {
    Lane& lane = engine.lanes[self->simdgroup * kSimdWidth + i];
    if (lane.state != LaneState::kAtSimdOp) continue;
    lane.completes_op = true;
    make_ready(&lane);
    return;
  }
}

void lane_main() {
  finish_switch(nullptr, first_lane_starts);
  first_lane_starts = false;
  Lane* self = engine.current;
  uint64_t arguments[kMaxArguments] = {};
  for (uint32_t i = 0; i < engine.launch->num_buffers; i++) {
    const Buffer& buffer = engine.launch->buffers[i];
    arguments[buffer.index] = reinterpret_cast<uint64_t>(buffer.data + buffer.origin);
  }
  msl_entry(arguments, &self->context);
  leave_lane(self);
  run_next(true);
  abort();
}

}  // namespace

void seed_scheduler(uint64_t seed) {
  random_state = seed * 0x9E3779B97F4A7C15ull + 0x1234567;
  if (!random_state) random_state = 1;
}

void forget_lanes() {
  barrier.arrived = 0;
  ready.clear();
  ready_head = 0;
}

void prepare_fiber(Lane& lane, char* stack) {
#if WITH_ASAN
  __asan_unpoison_memory_region(stack, kStackBytes);
#endif
  lane.stack = stack;
  void** top = reinterpret_cast<void**>(stack + kStackBytes - 64);
  *--top = nullptr;                                  // where a return address would be
  *--top = reinterpret_cast<void*>(lane_main);
  for (int i = 0; i < 6; i++) *--top = nullptr;      // the registers that msl_swap_stacks restores
  lane.stack_pointer = top;
}

void run_lanes() {
  engine.current = choose_lane();
  first_lane_starts = true;
  switch_to(engine.current, &scheduler_stack_pointer);
}

void stop() {
  engine.stopped = true;
  Lane* self = engine.current;
  engine.current = nullptr;
  if (self) switch_to(nullptr, &self->stack_pointer, true);
}

}  // namespace msl

// -------------------------------------------------------------------- what the shim calls from kernel code

using namespace msl;

extern "C" {

uint32_t __msl_lane() { return engine.current->lane; }

void __msl_fail(const char* message, uint32_t site) { report_at_line(kInactiveLane, site, message); }

// Puts this lane's value into the exchange buffer and waits for the rest of the simdgroup. `*last` is set for
// the lane that has to call __msl_simd_release (after reducing, where the operation reduces).
Exchange* __msl_simd_post(const void* value, uint32_t size, uint32_t site, uint32_t operation, int* last) {
  Lane* self = engine.current;
  Simdgroup& group = engine.simdgroups[self->simdgroup];
  Exchange* exchange = &group.exchange[group.phase & 1];
  if (group.arrived == 0) {
    group.site = site, group.operation = operation, group.value_size = size;
    exchange->mask = 0;
  } else if (group.site != site || group.operation != operation || group.value_size != size) {
    char detail[160];
    snprintf(detail, sizeof detail, "%u lanes of this thread's simdgroup wait at the simdgroup operation of line %u",
             group.arrived, group.site);
    report_at_line(kDivergence, site, detail);
    stop();
  }
  memcpy(exchange->slots + self->lane * size, value, size);
  exchange->mask |= 1u << self->lane;
  self->site = site;
  *last = ++group.arrived == group.live;
  if (!*last) {
    self->state = LaneState::kAtSimdOp;
    run_next();
    *last = self->completes_op;
    self->completes_op = false;
  }
  engine.launch->simd_ops += *last;
  return exchange;
}

void __msl_simd_release() {
  Lane* self = engine.current;
  Simdgroup& group = engine.simdgroups[self->simdgroup];
  group.phase++;
  group.arrived = 0;
  for (uint32_t i = 0; i < group.width; i++) {
    Lane& lane = engine.lanes[self->simdgroup * kSimdWidth + i];
    if (lane.state == LaneState::kAtSimdOp && &lane != self) make_ready(&lane);
  }
}

void __msl_simd_barrier(uint32_t flags, uint32_t site) {
  constexpr uint32_t kBarrierOperation = 100;  // beyond the shim's own numbers
  char nothing = 0;
  int last = 0;
  __msl_simd_post(&nothing, 1, site, kBarrierOperation + flags, &last);
  if (last) __msl_simd_release();
  if (flags & kMemThreadgroup) engine.current->threadgroup_epochs.simdgroup_barriers++;
  if (flags & kMemDevice) engine.current->device_epochs.simdgroup_barriers++;
}

void __msl_threadgroup_barrier(uint32_t flags, uint32_t site) {
  Lane* self = engine.current;
  if (barrier.arrived == 0) {
    barrier.site = site, barrier.flags = flags;
  } else if (barrier.site != site) {
    char detail[160];
    snprintf(detail, sizeof detail, "%u threads wait at the threadgroup_barrier of line %u", barrier.arrived,
             barrier.site);
    report_at_line(kDivergence, site, detail);
    stop();
  }
  self->state = LaneState::kAtBarrier;
  self->site = site;
  if (++barrier.arrived < engine.num_lanes) {
    run_next();
    return;
  }
  engine.launch->barriers++;
  barrier.arrived = 0;
  for (uint32_t i = 0; i < engine.num_lanes; i++) {
    Lane& lane = engine.lanes[i];
    if (flags & kMemThreadgroup) lane.threadgroup_epochs.threadgroup_barriers++;
    if (flags & kMemDevice) lane.device_epochs.threadgroup_barriers++;
    if (&lane != self) make_ready(&lane);
  }
  self->state = LaneState::kReady;
}

// The memory of a threadgroup variable: made by the first lane that reaches its declaration, filled with NaN.
void* __msl_threadgroup_variable(uint32_t id, size_t size, size_t align, const char* name, uint32_t site) {
  for (uint32_t i = 0; i < engine.num_variables; i++) {
    const ThreadgroupVariable& known = engine.variables[i];
    if (known.id == id && known.size == size) return engine.arena + known.offset;
  }
  const size_t alignment = std::max<size_t>(align, 16);
  const size_t offset = (engine.arena_top + alignment - 1) / alignment * alignment;
  if (engine.num_variables == kMaxVariables || offset + size + kRedZone > kArenaBytes) {
    Fault* fault = report(kOverLimit, name, "more threadgroup memory than the emulator holds");
    if (fault) fault->line = site;
    stop();
  }
  engine.variables[engine.num_variables++] = {id, offset, size, name};
  engine.arena_top = offset + size + kRedZone;
#if WITH_ASAN
  __asan_unpoison_memory_region(engine.arena + offset, size);
#endif
  memset(engine.arena + offset, 0xff, size);
  uint64_t& total = engine.launch->threadgroup_bytes;
  const uint64_t before = total;
  total += (size + 15) / 16 * 16;
  if (total > kMaxThreadgroupBytes && before <= kMaxThreadgroupBytes) {
    const auto largest = std::max_element(engine.variables, engine.variables + engine.num_variables,
                                          [](const auto& a, const auto& b) { return a.size < b.size; });
    Fault* fault = report(kOverLimit, largest->name, "%lu bytes of threadgroup memory, Metal allows %u",
                          static_cast<unsigned long>(total), kMaxThreadgroupBytes);
    if (fault) fault->line = site;
  }
  return engine.arena + offset;
}

__attribute__((weak)) void __msl_atomic(size_t, uint32_t, bool, bool, uint32_t) {}

// Compiler support that libgcc 12 lacks: float to bfloat, rounding to nearest even.
__bf16 __truncsfbf2(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  const uint16_t rounded = is_nan ? (bits >> 16) | 0x40 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  __bf16 result;
  memcpy(&result, &rounded, sizeof result);
  return result;
}
__bf16 __truncdfbf2(double value) { return __truncsfbf2(static_cast<float>(value)); }
}
