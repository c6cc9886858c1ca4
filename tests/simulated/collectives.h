// What happens when the last member has come to a collective, and how a member comes to it.
#pragma once
#include "kernels.h"

namespace {

Tensor interval(const Tensor& t, int64_t index, int64_t count) {
  auto flat = t.view(-1);
  return flat.narrow(0, index * (flat.numel() / count), flat.numel() / count);
}

void add(Tensor& total, const Tensor& term, int reduce) {  // the numbers of c10d.ReduceOp
  if (reduce == 3) total.copy_(total.minimum(term));
  else if (reduce == 4) total.copy_(total.maximum(term));
  else total.add_(term);
}

void happen(Meeting& meeting) {
  Kernels kernels;
  auto n = meeting.size;
  auto &in = meeting.inputs, &out = meeting.outputs;
  auto& what = meeting.what;
  auto sum = [&](const std::function<Tensor(int)>& term) {
    auto total = term(0).clone();
    for (int r = 1; r < n; r++) add(total, term(r), meeting.reduce);
    if (meeting.reduce == 1) total.div_(n);
    return total;
  };
  try {
    if (what.rfind("all_gather", 0) == 0) {  // into one tensor, or into one per member
      for (int r = 0; r < n; r++)
        for (int s = 0; s < n; s++)
          (out[r].size() == 1 && n > 1 ? interval(out[r][0], s, n) : out[r][s].view(-1)).copy_(in[s][0].reshape(-1));
    } else if (what.rfind("all_reduce", 0) == 0) {
      for (size_t i = 0; i < in[0].size(); i++) {
        auto total = sum([&](int r) { return in[r][i]; });
        for (int r = 0; r < n; r++) out[r][i].copy_(total);
      }
    } else if (what.rfind("reduce_scatter", 0) == 0) {
      std::vector<Tensor> sums;
      for (int s = 0; s < n; s++) sums.push_back(sum([&](int r) { return interval(in[r][0], s, n); }));
      for (int s = 0; s < n; s++) out[s][0].view(-1).copy_(sums[s]);
    } else if (what.rfind("broadcast", 0) == 0) {
      for (int r = 0; r < n; r++) if (r != meeting.root) out[r][0].copy_(in[meeting.root][0]);
    } else if (what.rfind("all_to_all", 0) == 0) {
      for (int r = 0; r < n; r++)
        for (int s = 0; s < n; s++) out[r][s].copy_(in[s][r]);
    }
  } catch (const std::exception& error) { failure = what + ": " + error.what(); }
}

// Launch this member's part of a collective, in the current stream; that of tensors of the CPU in the communicator's own.
// Returns the number of the task after it.
int64_t meet(int64_t communicator, int64_t member, int64_t size, c10::string_view what, at::TensorList outputs,
          at::TensorList inputs, int64_t reduce, int64_t root) {
  bool on_device = (!outputs.empty() && is_here(outputs[0])) || (!inputs.empty() && is_here(inputs[0]));
  int device = on_device ? (outputs.empty() ? inputs : outputs)[0].device().index() : current_device;
  int64_t id = on_device ? current_stream(device) : -1 - communicator;
  Here here(std::string(what).c_str());
  std::vector<Use> uses;
  for (const auto& t : inputs) if (is_here(t)) uses.push_back(use_of(t, false));
  for (const auto& t : outputs) if (is_here(t)) uses.push_back(use_of(t, true));
  {
    std::lock_guard guard(lock);
    auto number = entered[{communicator, member}]++;
    auto& meeting = meetings[{communicator, number}];
    std::string description(what);
    if (what != "all_to_all" && !inputs.empty())  // its parts may be of different sizes
      description += " of " + std::to_string(inputs[0].numel()) + " " + c10::toString(inputs[0].scalar_type());
    if (!meeting) {
      meeting = std::make_shared<Meeting>();
      *meeting = {description, int(communicator), int(size), {}, {}, {}, {}, int(reduce), int(root)};
      meeting->parts.resize(size); meeting->outputs.resize(size); meeting->inputs.resize(size); meeting->arrived.resize(size);
    }
    TORCH_CHECK(meeting->what == description && meeting->reduce == reduce && meeting->root == root, "communicator ",
                communicator, ": member ", member, " enters ", description, " where another has entered ", meeting->what);
    auto low = [](at::TensorList tensors) {
      std::vector<Tensor> result;
      for (const auto& t : tensors) result.push_back(is_here(t) ? for_tasks(t) : t.detach());
      return result;
    };
    meeting->outputs[member] = low(outputs); meeting->inputs[member] = low(inputs);
    meeting->parts[member] = Point{device, id, stream_at(device, id).queued};
    auto kept = meeting;
    bool all = true;
    for (auto& part : kept->parts) all = all && part;
    if (all) meetings.erase({communicator, number});
    return launch(device, id, {description, nullptr, std::nullopt, kept, uses}) + 1;
  }
}

void wait_on_host(int64_t communicator, int64_t upto) {
  block(current_device, -1 - communicator, upto, "collective between hosts");
}

}  // namespace
