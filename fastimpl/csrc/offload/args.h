// Checks that the launchers of the offload operators share.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <cstdint>
#include <vector>

#include "common/regimes.h"
#include "offload/copy.h"
#include "offload/foreach.h"
#include "offload/pack.h"

namespace fastimpl::offload {

// Whether the elements fill their memory without gaps, in any order of dimensions. Quadratic in the rank, which is
// small.
inline bool is_dense(const torch::stable::Tensor& t) {
  if (t.is_contiguous()) return true;
  int64_t expected = 1;
  for (int64_t done = 0; done < t.dim(); ++done) {
    bool found = false;
    for (int64_t d = 0; d < t.dim() && !found; ++d) {
      if (t.size(d) > 1 && t.stride(d) == expected) {
        expected *= t.size(d);
        found = true;
      }
    }
    if (!found) break;
  }
  return t.numel() <= 1 || expected == t.numel();
}

inline bool have_same_order(const torch::stable::Tensor& a, const torch::stable::Tensor& b) {
  if (a.dim() != b.dim()) return false;
  for (int64_t d = 0; d < a.dim(); ++d) {
    if (a.size(d) != b.size(d) || (a.size(d) > 1 && a.stride(d) != b.stride(d))) return false;
  }
  return true;
}

// So many entries need no memory of the heap. The C library gives and takes back arrays of up to 1 KiB without a look
// at its other blocks; a larger one first merges all small blocks that were freed since, which were one or two a
// tensor.
constexpr int64_t kFewEntries = regime(64, 3);

// Tensors and their places in a slab, which have to be in order and apart: then any split between threads is right.
// Fills an entry for each, and returns the bytes of all.
inline int64_t pack_entries(const std::vector<torch::stable::Tensor>& tensors, const torch::stable::Tensor& slab,
                            const std::vector<int64_t>& offsets, PackEntry* entries) {
  STD_TORCH_CHECK(slab.scalar_type() == torch::headeronly::ScalarType::Byte && slab.is_contiguous() && slab.dim() == 1,
                  "slab: not a contiguous 1-D uint8 tensor");
  STD_TORCH_CHECK(tensors.size() == offsets.size(), "offsets: got ", offsets.size(), " for ", tensors.size(),
                  " tensors");
  int64_t end = 0, total = 0;
  const bool on_cpu = slab.is_cpu();
  const int64_t room = slab.numel();
  for (size_t i = 0; i < tensors.size(); ++i) {
    const torch::stable::Tensor& t = tensors[i];
    const int64_t size = t.numel() * static_cast<int64_t>(t.element_size());
    STD_TORCH_CHECK(on_cpu ? t.is_cpu() : (t.is_cuda() && t.get_device_index() == slab.get_device_index()), "tensor ",
                    i, ": not on the device of the slab");
    STD_TORCH_CHECK(is_dense(t), "tensor ", i, ": has gaps");
    STD_TORCH_CHECK(offsets[i] >= end && offsets[i] <= room - size, "tensor ", i, ": bytes ", offsets[i], " + ", size,
                    " of a slab of ", room, ", of which ", end, " are taken");
    entries[i] = {static_cast<uint8_t*>(t.data_ptr()), offsets[i], size};
    end = offsets[i] + size;
    total += size;
  }
  return total;
}

// Parameters of one kind and one dtype, and the sets of numbers that they are stepped with.
struct SlotLists {
  SlotKind kind;
  Float type;
  std::vector<SlotTensors> entries;
  std::vector<SlotHyper> hypers;
};

inline std::vector<SlotHyper> slot_hypers(const std::vector<double>& words) {
  STD_TORCH_CHECK(words.size() % kSlotHyperWords == 0, "hypers: got ", words.size(), " values, expected ",
                  kSlotHyperWords, " each");
  std::vector<SlotHyper> found;
  for (size_t i = 0; i < words.size(); i += kSlotHyperWords) {
    float h[kSlotHyperWords];
    for (size_t k = 0; k < kSlotHyperWords; ++k) h[k] = static_cast<float>(words[i + k]);
    const double flags = words[i + kSlotHyperWords - 1];
    STD_TORCH_CHECK(flags >= 0 && flags <= kSlotFlags, "hypers: got flags ", flags);
    found.push_back({h[0], h[1], h[2], h[3], h[4], h[5], h[6], h[7], static_cast<int32_t>(flags)});
  }
  return found;
}

inline Float slot_float(const torch::stable::Tensor& t) {
  using torch::headeronly::ScalarType;
  if (t.scalar_type() == ScalarType::Float) return Float::kFloat32;
  if (t.scalar_type() == ScalarType::Half) return Float::kFloat16;
  STD_TORCH_CHECK(t.scalar_type() == ScalarType::BFloat16, "params: not float32, float16 or bfloat16");
  return Float::kBFloat16;
}

// Everything is checked before anything is written. Each list but the first has a tensor like each parameter, or none.
inline SlotLists slot_lists(int64_t kind, const std::vector<torch::stable::Tensor>& params,
                            const std::vector<torch::stable::Tensor>& grads,
                            const std::vector<const std::vector<torch::stable::Tensor>*>& states,
                            const std::vector<int64_t>& hyper_of, const std::vector<double>& hypers) {
  STD_TORCH_CHECK(kind >= 0 && kind < kSlotKindCount, "kind: got ", kind, ", expected 0 to ", kSlotKindCount - 1);
  SlotLists lists{static_cast<SlotKind>(kind), Float::kFloat32, {}, slot_hypers(hypers)};
  const size_t count = params.size(), wanted = static_cast<size_t>(slot_state_count(lists.kind));
  STD_TORCH_CHECK(grads.size() == count && hyper_of.size() == count, "got ", grads.size(), " gradients and ",
                  hyper_of.size(), " places of hyperparameters for ", count, " parameters");
  for (size_t k = 0; k < states.size(); ++k) {
    STD_TORCH_CHECK(states[k]->size() == (k < wanted ? count : 0), "state ", k, ": got ", states[k]->size(),
                    " tensors for ", count, " parameters of a kind with ", wanted, " states");
  }
  if (count == 0) return lists;
  lists.type = slot_float(params[0]);
  for (size_t i = 0; i < count; ++i) {
    const torch::stable::Tensor& param = params[i];
    const auto check = [&](const torch::stable::Tensor& t, const char* name) {
      STD_TORCH_CHECK(t.scalar_type() == params[0].scalar_type() &&
                          t.get_device_index() == params[0].get_device_index() && t.is_cpu() == params[0].is_cpu() &&
                          have_same_order(t, param),
                      name, " ", i, ": not of the dtype, device, shape and strides of its parameter");
    };
    check(param, "params");
    STD_TORCH_CHECK(is_dense(param), "params ", i, ": has gaps");
    STD_TORCH_CHECK(hyper_of[i] >= 0 && hyper_of[i] < static_cast<int64_t>(lists.hypers.size()), "hyper_of ", i,
                    ": got ", hyper_of[i], " of ", lists.hypers.size());
    check(grads[i], "grads");
    SlotTensors entry{param.data_ptr(), grads[i].data_ptr(), {}, param.numel(), hyper_of[i]};
    for (size_t k = 0; k < wanted; ++k) {
      check((*states[k])[i], "states");
      entry.states[k] = (*states[k])[i].data_ptr();
    }
    lists.entries.push_back(entry);
  }
  return lists;
}

// The start of the allocation that a tensor lies in.
inline const void* home_of(const torch::stable::Tensor& t) {
  return static_cast<const uint8_t*>(t.data_ptr()) - t.storage_offset() * static_cast<int64_t>(t.element_size());
}

// Copies of whole tensors, merged where neighbours follow each other. Everything is checked first. `check` looks at the
// places of a pair.
template <typename Check>
std::vector<CopyRun> copy_runs(const std::vector<torch::stable::Tensor>& targets,
                               const std::vector<torch::stable::Tensor>& sources, const Check& check) {
  STD_TORCH_CHECK(targets.size() == sources.size(), "got ", targets.size(), " targets for ", sources.size(),
                  " sources");
  std::vector<CopyRun> runs;
  for (size_t i = 0; i < targets.size(); ++i) {
    const torch::stable::Tensor &to = targets[i], &from = sources[i];
    STD_TORCH_CHECK(to.scalar_type() == from.scalar_type() && have_same_order(to, from), "copy ", i,
                    ": not of one dtype, shape and strides");
    STD_TORCH_CHECK(is_dense(to), "copy ", i, ": has gaps");
    check(to, from, i);
    add_copy(runs, {static_cast<uint8_t*>(to.data_ptr()), static_cast<const uint8_t*>(from.data_ptr()),
                    to.numel() * static_cast<int64_t>(to.element_size()), home_of(to), home_of(from)});
  }
  return runs;
}

}  // namespace fastimpl::offload
