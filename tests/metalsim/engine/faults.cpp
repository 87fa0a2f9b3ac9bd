// What is wrong and with which variable: the list of faults, and names for addresses.
#include <dlfcn.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstring>

#include "engine.h"

namespace msl {

uint64_t module_offset(const void* address) {
  Dl_info info;
  if (!dladdr(address, &info) || !info.dli_fbase) return 0;
  return reinterpret_cast<uintptr_t>(address) - reinterpret_cast<uintptr_t>(info.dli_fbase);
}

Fault* report(FaultKind kind, const char* variable, const char* format, ...) {
  Launch& launch = *engine.launch;
  if (launch.num_faults == kMaxFaults) return nullptr;
  Fault& fault = launch.faults[launch.num_faults++];
  fault = Fault{};
  fault.kind = kind;
  if (const Lane* lane = engine.current) {
    memcpy(fault.threadgroup, lane->context.threadgroup_position_in_grid, sizeof fault.threadgroup);
    fault.thread = lane->thread;
    fault.has_thread = 1;
  }
  snprintf(fault.variable, sizeof fault.variable, "%s", variable);
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(fault.detail, sizeof fault.detail, format, arguments);
  va_end(arguments);
  return &fault;
}

const Buffer* nearest_buffer(uintptr_t address, int64_t* offset) {
  const Buffer* best = nullptr;
  int64_t best_distance = INT64_MAX;
  for (uint32_t i = 0; i < engine.launch->num_buffers; i++) {
    const Buffer& buffer = engine.launch->buffers[i];
    const int64_t from_start = static_cast<int64_t>(address - reinterpret_cast<uintptr_t>(buffer.data));
    const int64_t past_end = from_start - static_cast<int64_t>(buffer.size) + 1;
    const int64_t distance = std::max({int64_t(0), -from_start, past_end});
    if (distance >= best_distance) continue;
    best = &buffer;
    best_distance = distance;
    *offset = from_start - static_cast<int64_t>(buffer.origin);
  }
  return best;
}

const ThreadgroupVariable* variable_at(uintptr_t address) {
  const size_t offset = address - reinterpret_cast<uintptr_t>(engine.arena);
  for (uint32_t i = 0; i < engine.num_variables; i++) {
    const ThreadgroupVariable& variable = engine.variables[i];
    if (offset >= variable.offset && offset < variable.offset + variable.size) return &variable;
  }
  return nullptr;
}

const ThreadgroupVariable* nearest_variable(uintptr_t address) {
  const size_t offset = address - reinterpret_cast<uintptr_t>(engine.arena);
  const ThreadgroupVariable* best = nullptr;
  size_t best_distance = SIZE_MAX;
  for (uint32_t i = 0; i < engine.num_variables; i++) {
    const ThreadgroupVariable& variable = engine.variables[i];
    const size_t end = variable.offset + variable.size;
    const size_t distance = offset < variable.offset ? variable.offset - offset : offset >= end ? offset - end : 0;
    if (distance < best_distance) best_distance = distance, best = &variable;
  }
  return best;
}

}  // namespace msl

// The threadgroup variable or buffer at or near an address, for AddressSanitizer's reports; "" if none is near.
extern "C" const char* msl_name_of(uintptr_t address, int64_t* offset) {
  using namespace msl;
  constexpr int64_t kReach = 4096;
  const auto arena = reinterpret_cast<uintptr_t>(engine.arena);
  if (address - arena < kArenaBytes) {
    const ThreadgroupVariable* variable = nearest_variable(address);
    if (variable) *offset = static_cast<int64_t>(address - arena) - static_cast<int64_t>(variable->offset);
    return variable ? variable->name : "";
  }
  const Buffer* buffer = nearest_buffer(address, offset);
  const bool is_near = buffer && *offset > -kReach && *offset < static_cast<int64_t>(buffer->size) + kReach;
  return is_near ? buffer->name : "";
}
