// How an operator becomes a task: the CPU's kernel on the device's memory, and results that are there before it has run.
#pragma once
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <torch/library.h>

#include <sstream>
#include <unordered_map>

#include "memory.h"

namespace {

using c10::IValue;
using torch::jit::Stack;

bool is_here(const Tensor& t) { return t.defined() && t.device().type() == SIM; }

// What a task computes with: the tensor's memory as the CPU's. It does not keep that memory alive, as on a device.
Tensor for_tasks(const Tensor& t) {
  TORCH_CHECK(t.layout() == c10::kStrided && !t.is_conj() && !t.is_neg(), "the simulated device has plain tensors only");
  auto options = at::TensorOptions().dtype(t.dtype()).device(c10::kCPU);
  if (t.numel() == 0) return at::empty_strided(t.sizes(), t.strides(), options);
  auto* storage = t.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  auto end = size_t(t.storage_offset() + 1) * t.itemsize();
  for (int64_t d = 0; d < t.dim(); d++) end += size_t((t.size(d) - 1) * t.stride(d)) * t.itemsize();
  TORCH_CHECK(storage->data() && end <= storage->nbytes(), "a kernel on memory that has been freed: ", end,
              " bytes of a storage of ", storage->nbytes());
  auto* at = arena().for_tasks(static_cast<const char*>(storage->data()) + t.storage_offset() * t.itemsize());
  return at::from_blob(at, t.sizes(), t.strides(), options);
}

// The bytes from the first to the last that belong to a tensor.
Use use_of(const Tensor& t, bool writes) {
  auto begin = uintptr_t(t.storage().data()) + t.storage_offset() * t.itemsize(), end = begin + (t.numel() ? t.itemsize() : 0);
  for (int64_t d = 0; t.numel() && d < t.dim(); d++) end += (t.size(d) - 1) * t.stride(d) * t.itemsize();
  return {begin, end, writes};
}

IValue map_tensors(const IValue& value, const std::function<Tensor(const Tensor&)>& f) {
  if (value.isTensor()) return value.toTensor().defined() ? IValue(f(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<Tensor> mapped;
    for (const Tensor& t : value.toTensorVector()) mapped.push_back(t.defined() ? f(t) : t);
    return mapped;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> mapped;
    for (std::optional<Tensor> t : value.toOptionalTensorList())
      mapped.push_back(t && t->defined() ? std::optional<Tensor>(f(*t)) : t);
    return mapped;
  }
  return value;
}

Stack mapped(const Stack& arguments, c10::Device device, const std::function<Tensor(const Tensor&)>& f) {
  Stack result;
  for (const auto& value : arguments) result.push_back(value.isDevice() ? IValue(device) : map_tensors(value, f));
  return result;
}

// Whether a tensor stands for a number decides of what dtype results are.
Tensor marked_as(const Tensor& other, Tensor t) {
  if (other.unsafeGetTensorImpl()->is_wrapped_number()) t.unsafeGetTensorImpl()->set_wrapped_number(true);
  return t;
}

// Of the same shape and dtype, and of no meaning.
Tensor blank_like(const Tensor& t) {
  if (!is_here(t) && !t.dim()) return t;  // a number
  return at::empty_strided(t.sizes(), t.strides(), at::TensorOptions().dtype(t.dtype()).device(c10::kCPU)).zero_();
}

int device_of(const Stack& arguments) {
  int device = current_device;
  for (const auto& value : arguments) {
    if (value.isDevice() && value.toDevice().type() == SIM) device = index_of(value.toDevice());
    map_tensors(value, [&](const Tensor& t) { if (is_here(t)) device = t.device().index(); return t; });
  }
  return device;
}

// Shapes depend on values, so the host needs them.
bool needs_host(const c10::OperatorHandle& op, const Stack& arguments) {
  const auto& name = op.schema().name();
  if (name == "aten::index" || name == "aten::index.Tensor_out" || name == "aten::index_put_" || name == "aten::_index_put_impl_" || name == "aten::index_put") {
    bool masks = false;
    map_tensors(arguments[1], [&](const Tensor& t) { masks = masks || t.dtype() == at::kBool || t.dtype() == at::kByte; return t; });
    return masks;
  }
  return op.hasTag(at::Tag::data_dependent_output) || op.hasTag(at::Tag::dynamic_output_shape);
}

// Random numbers are those of the launch, as CUDA's are by their offset: not of the moment when the task runs.
std::function<void()> seeded(int device, std::function<void()> run) {
  auto seed = uint64_t(devices[device].seed) * 1000003 + uint64_t(devices[device].drawn++);
  return [=] {
    auto generator = at::detail::getDefaultCPUGenerator();
    std::lock_guard guard(generator.mutex());
    auto state = generator.get_state();
    generator.set_current_seed(seed);
    { auto unlocked = std::unique_lock(generator.mutex(), std::adopt_lock); unlocked.unlock(); run(); unlocked.lock(); unlocked.release(); }
    generator.set_state(state);
  };
}

bool describe(std::ostream& text, const IValue& value) {
  bool is_plain = true;
  if (value.isTensor() || value.isTensorList() || value.isOptionalTensorList()) {
    map_tensors(value, [&](const Tensor& t) {
      is_plain = is_plain && (is_here(t) || !t.dim());
      text << int(t.scalar_type()) << is_here(t) << t.unsafeGetTensorImpl()->is_wrapped_number() << '(';
      for (auto n : t.sizes()) text << n << ',';
      for (auto n : t.strides()) text << n << ';';
      return t;
    });
    if (value.isOptionalTensorList())
      for (std::optional<Tensor> t : value.toOptionalTensorList()) text << t.has_value();
  } else if (value.isInt()) text << value.toInt();
  else if (value.isBool()) text << value.toBool();
  else if (value.isDouble()) text << value.toDouble();
  else if (value.isIntList()) for (auto n : value.toIntVector()) text << n << ',';
  else if (value.isString()) text << value.toStringRef();
  else is_plain = value.isNone() || value.isDevice();
  text << '|' << value.tagKind();
  return is_plain;
}

// What an operator returns, as tensors of the right shape, strides and dtype: found out once for each kind of arguments,
// by the CPU's kernel itself.
Stack results_of(const c10::OperatorHandle& op, const Stack& arguments) {
  static std::unordered_map<std::string, Stack> known;
  std::ostringstream text;
  text.precision(17);
  text << op.schema().name() << '.' << op.schema().overload_name() << ' ';
  bool is_known = true;
  for (const auto& value : arguments) is_known = describe(text, value) && is_known;
  std::lock_guard guard(lock);
  if (is_known) {
    auto found = known.find(text.str());
    if (found != known.end()) return found->second;
  }
  auto results = mapped(arguments, c10::kCPU, blank_like);
  auto generator = at::detail::getDefaultCPUGenerator();
  auto state = op.hasTag(at::Tag::nondeterministic_seeded) ? generator.get_state() : Tensor();
  { Kernels kernels; op.callBoxed(&results); }
  if (state.defined()) generator.set_state(state);
  if (is_known) known[text.str()] = results;
  return results;
}

void push_results(const c10::OperatorHandle& op, Stack* stack, const Stack& arguments, const std::vector<IValue>& made) {
  size_t next = 0;
  for (const auto& result : op.schema().returns()) {
    const auto* alias = result.alias_info();
    if (!alias) { stack->push_back(made.at(next++)); continue; }
    for (size_t i = 0; i < arguments.size(); i++) {
      const auto* other = op.schema().arguments()[i].alias_info();
      if (other && *other == *alias) { stack->push_back(arguments[i]); break; }
    }
  }
}

std::vector<Use> uses_of(const c10::OperatorHandle& op, const Stack& arguments, const std::vector<IValue>& made) {
  std::vector<Use> uses;
  auto add = [&](const IValue& value, bool writes) {
    map_tensors(value, [&](const Tensor& t) { if (is_here(t)) uses.push_back(use_of(t, writes)); return t; });
  };
  for (size_t i = 0; looks_for_races && i < arguments.size(); i++) {
    const auto* alias = op.schema().arguments()[i].alias_info();
    add(arguments[i], alias && alias->isWrite());
  }
  for (const auto& value : made) add(value, true);
  return uses;
}

void fallback(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  Here here(schema.name().c_str());
  Stack arguments(stack->end() - schema.arguments().size(), stack->end());
  stack->erase(stack->end() - schema.arguments().size(), stack->end());
  int device = device_of(arguments);
  int64_t stream = current_stream(device);
  std::string name = schema.name();
  bool depends_on_values = needs_host(op, arguments), on_host = depends_on_values;
  auto lower = [&](const Tensor& t) {
    if (is_here(t)) return for_tasks(t);
    if (t.device().is_meta()) TORCH_CHECK(false, name, ": a tensor on the meta device among those of the simulated one");
    if (t.dim()) on_host = true;  // CUDA copies it to the device first, which waits
    return marked_as(t, t.clone());
  };
  auto low = mapped(arguments, c10::kCPU, lower);
  if (on_host) {
    block(device, stream, schema.name().c_str());
    std::lock_guard guard(lock);
    if (looks_for_races) check_uses(device, stream, uses_of(op, arguments, {}));
  }

  if (depends_on_values && !(schema.returns().size() && schema.returns()[0].alias_info())) {
    std::lock_guard guard(lock);
    { Kernels kernels; op.callBoxed(&low); }
    std::vector<IValue> made;
    for (auto& value : low) made.push_back(map_tensors(value, [&](const Tensor& t) {
      auto out = at::empty_strided(t.sizes(), t.strides(), t.options().device(c10::Device(SIM, device)));
      auto to = for_tasks(out);
      launch(device, stream, {name, [to, t] { to.copy_(t); }});
      return out;
    }));
    push_results(op, stack, arguments, made);
    return;
  }

  bool has_new = false, has_out = false;
  for (const auto& result : schema.returns()) has_new = has_new || !result.alias_info();
  for (const auto& argument : schema.arguments()) has_out = has_out || argument.is_out();
  std::vector<IValue> made;
  std::vector<Tensor> fresh;  // what tasks write results into, in their order
  if ((has_new || has_out) && !depends_on_values) {
    auto results = results_of(op, arguments);
    for (size_t i = 0, n = 0; has_out && i < arguments.size(); i++) {
      if (!schema.arguments()[i].is_out() || !arguments[i].isTensor()) continue;
      auto out = arguments[i].toTensor();
      const auto& wanted = results.at(n++).toTensor();
      if (!out.sizes().equals(wanted.sizes())) { out.resize_(wanted.sizes()); low[i] = for_tasks(out); }
    }
    for (const auto& value : results) {
      if (!has_new) break;
      made.push_back(map_tensors(value, [&](const Tensor& t) {
        auto out = at::empty_strided(t.sizes(), t.strides(), t.options().device(c10::Device(SIM, device)));
        fresh.push_back(for_tasks(out));
        return out;
      }));
    }
  }
  std::function<void()> run = [op, low, fresh, has_new] {
    auto values = low;
    op.callBoxed(&values);
    size_t next = 0;
    if (has_new)
      for (auto& value : values) map_tensors(value, [&](const Tensor& t) { fresh.at(next++).copy_(t); return t; });
  };
  if (op.hasTag(at::Tag::nondeterministic_seeded)) run = seeded(device, run);
  launch(device, stream, {name, run, std::nullopt, nullptr, uses_of(op, arguments, made)});
  push_results(op, stack, arguments, made);
}

Tensor copy_from(const Tensor& source, const Tensor& target, bool non_blocking) {
  Here here("copy");
  std::vector<Use> uses{use_of(source, false), use_of(target, true)};
  if (is_here(source) && is_here(target)) {
    int device = target.device().index();
    auto from = for_tasks(source), to = for_tasks(target);
    launch(device, current_stream(device), {"copy", [=] { to.copy_(from); }, std::nullopt, nullptr, uses});
    return target;
  }
  bool arrives = is_here(target);
  int device = (arrives ? target : source).device().index();
  auto from = arrives ? source.detach() : for_tasks(source), to = arrives ? for_tasks(target) : target.detach();
  if (arrives && from.dtype() != to.dtype()) from = from.to(to.dtype());  // by the host, at once
  auto plain = arrives ? from : to;
  auto* pinned = Pinned::instance();
  bool is_late = false;
  {
    std::lock_guard guard(lock);
    auto page = plain.numel() ? pinned->find(plain.const_data_ptr()) : pinned->pages.end();
    is_late = non_blocking && page != pinned->pages.end();
    if (is_late) {  // the memory, not the tensor: that may go, and the copy goes on
      page->second.uses++;
      auto start = page->first;
      auto raw = at::from_blob(plain.data_ptr(), plain.sizes(), plain.strides(), plain.options());
      launch(device, current_stream(device), {"copy", [=] {
        if (arrives) to.copy_(raw); else raw.copy_(from);
        pinned->pages.at(start).uses--; pinned->drop(start);
      }, std::nullopt, nullptr, uses});
    }
  }
  if (is_late) return target;
  auto at = launch(device, current_stream(device), {"copy", [=] { to.copy_(from); }, std::nullopt, nullptr, uses});
  block(device, current_stream(device), at + 1, arrives ? "copy to the device" : "copy to the host");
  return target;
}

}  // namespace
