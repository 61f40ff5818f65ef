// Kernels are those of the CPU, on the device's memory.
//
// One boxed fallback serves every operator: it makes CPU tensors over the same bytes, runs the CPU's kernel, and maps
// what comes back to the device: the same tensor (in place), a view (the same storage), or new memory. A sparse tensor
// is its indices and its values.
#pragma once
#include "device.h"

#include <optional>
#include <unordered_map>

#include <ATen/SparseTensorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/strides.h>
#include <torch/library.h>

namespace simulated {

using c10::IValue;
using torch::jit::Stack;

// Below autograd, as every kernel runs.
struct BelowAutograd {
  c10::impl::ExcludeDispatchKeyGuard guard{c10::autograd_dispatch_keyset_with_ADInplaceOrView};
};

inline Tensor tensor_over(const c10::Storage& storage, const Tensor& like, c10::DispatchKeySet keys) {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(storage), keys, like.dtype());
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.is_conj()) tensor._set_conj(true);
  if (like.is_neg()) tensor._set_neg(true);
  return tensor;
}

constexpr c10::DispatchKeySet ON_HOST(c10::DispatchKey::CPU), ON_DEVICE(c10::DispatchKey::PrivateUse1);

inline c10::Storage host_storage_over(const c10::Storage& storage) {
  void* address = storage.data() ? flipped(storage.data()) : nullptr;
  return c10::Storage(c10::Storage::use_byte_size_t(), storage.nbytes(),
                      c10::DataPtr(address, c10::Device(c10::kCPU)), c10::GetCPUAllocator(), /*resizable=*/true);
}

inline c10::Storage device_storage_with(const c10::Storage& host, c10::Device device) {
  return c10::Storage(c10::Storage::use_byte_size_t(), host.nbytes(),
                      new_memory(device, host.data(), host.nbytes(), host.nbytes()), &device_allocator,
                      /*resizable=*/true);
}

// The CPU tensors that stand for device tensors during one call.
class Aliases {
 public:
  // A CPU tensor over the bytes of `tensor`; tensors that share storage share it here, too.
  Tensor to_host(const Tensor& tensor) {
    auto host = tensor.is_sparse() ? sparse_over(tensor, to_host(tensor._indices()), to_host(tensor._values()))
                                   : dense_to_host(tensor);
    tensor_of_.emplace(host.unsafeGetTensorImpl(), std::pair(host, tensor));
    return host;
  }

  // The device tensor of what a CPU kernel has returned.
  Tensor to_device(const Tensor& host, c10::Device device) {
    if (!host.defined() || on_device(host)) return host;
    if (auto same = tensor_of_.find(host.unsafeGetTensorImpl()); same != tensor_of_.end()) return same->second.second;
    if (host.is_sparse())
      return sparse_over(host, to_device(host._indices(), device), to_device(host._values(), device));
    TORCH_CHECK(host.layout() == c10::kStrided, "simulated device: ", host.layout(), " tensors are not supported");
    auto storage = host.storage();
    auto [found, is_new] = device_of_.try_emplace(storage.unsafeGetStorageImpl());
    auto& [memory, keys] = found->second;
    if (is_new) {
      auto like = at::detail::make_tensor<c10::TensorImpl>(device_storage_with(storage, device), ON_DEVICE, host.dtype());
      found->second = {like.storage(), like.key_set()};
    }
    return tensor_over(memory, host, keys);
  }

  // A kernel may have resized what it writes: `tensor` becomes what `host` is now.
  void follow(const Tensor& host, const Tensor& tensor) {
    if (tensor.is_sparse()) {
      auto* impl = static_cast<at::SparseTensorImpl*>(tensor.unsafeGetTensorImpl());
      auto indices = to_device(host._indices(), tensor.device()), values = to_device(host._values(), tensor.device());
      impl->raw_resize_(host.sparse_dim(), host.dense_dim(), host.sizes());
      impl->set_indices_and_values_unsafe(indices, values);
      impl->set_coalesced(host.is_coalesced());
      return;
    }
    auto from = host.storage(), to = tensor.storage();
    if (from.data() != (to.data() ? flipped(to.data()) : nullptr)) {
      to.set_data_ptr_noswap(new_memory(tensor.device(), from.data(), from.nbytes(), from.nbytes()));
      to.set_nbytes(from.nbytes());
    }
    if (host.sizes() != tensor.sizes() || host.strides() != tensor.strides() ||
        host.storage_offset() != tensor.storage_offset())
      tensor.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
  }

 private:
  static Tensor sparse_over(const Tensor& like, const Tensor& indices, const Tensor& values) {
    return at::_sparse_coo_tensor_with_dims_and_tensors(like.sparse_dim(), like.dense_dim(), like.sizes(), indices,
                                                        values, values.options().layout(c10::kSparse),
                                                        like.is_coalesced());
  }

  Tensor dense_to_host(const Tensor& tensor) {
    auto storage = tensor.unsafeGetTensorImpl()->unsafe_storage();
    auto [found, is_new] = host_of_.try_emplace(storage.unsafeGetStorageImpl());
    if (is_new) {
      found->second = host_storage_over(storage);
      auto keys = tensor.key_set() & (ON_DEVICE | c10::DispatchKeySet(c10::DispatchKey::AutocastPrivateUse1) |
                                      c10::autograd_dispatch_keyset_with_ADInplaceOrView);
      device_of_.emplace(found->second.unsafeGetStorageImpl(), std::pair(storage, keys));
    }
    return tensor_over(found->second, tensor, ON_HOST);
  }

  std::unordered_map<c10::StorageImpl*, c10::Storage> host_of_;
  std::unordered_map<c10::StorageImpl*, std::pair<c10::Storage, c10::DispatchKeySet>> device_of_;  // keys of its views
  // The tensors on the host are kept, so that no result of the kernel takes their address.
  std::unordered_map<c10::TensorImpl*, std::pair<Tensor, Tensor>> tensor_of_;
};

// `value` with each of its tensors replaced by `replace(tensor)`.
template <class Replace>
IValue map_tensors(const IValue& value, Replace replace) {
  if (value.isTensor()) return value.toTensor().defined() ? IValue(replace(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<Tensor> tensors;
    for (const Tensor& tensor : value.toTensorVector()) tensors.push_back(replace(tensor));
    return tensors;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> tensors;
    for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector())
      tensors.push_back(tensor && tensor->defined() ? std::optional<Tensor>(replace(*tensor)) : tensor);
    return tensors;
  }
  return value;
}

// `visit` the tensors with memory that `tensor` is made of.
template <class Visit>
void for_each_dense(const Tensor& tensor, Visit visit) {
  if (!tensor.is_sparse()) return visit(tensor);
  visit(tensor._indices());
  visit(tensor._values());
}

// ---- the fallback, in steps -----------------------------------------------------------------------------------------

class Call {
 public:
  Call(const c10::OperatorHandle& op, Stack* stack)
      : op_(op), schema_(op.schema()), stack_(stack), first_(stack->size() - schema_.arguments().size()) {}

  void run() {
    find_device();
    reads_on_host_ = returns_to_host();
    if (reads_on_host_) {
      Lock lock;
      note_host_wait("item");
    }
    arguments_to_host();
    if (!is_view()) start();
    run_on_cpu();
    results_to_device();
    if (reads_on_host_) {
      Lock lock;
      host_waits_for(lock, current_stream(device_));
    }
  }

 private:
  IValue& argument(size_t i) { return (*stack_)[first_ + i]; }
  bool writes(size_t i) const {
    auto* alias = schema_.arguments()[i].alias_info();
    return alias && alias->isWrite();
  }

  // The one device of all arguments. Torch's own error if there are two, or a tensor of the CPU that is no scalar.
  void find_device() {
    bool host_tensor = false;
    for (size_t i = 0; i < schema_.arguments().size(); i++) {
      auto& value = argument(i);
      bool index = value.isOptionalTensorList();  // a CPU index is copied
      map_tensors(value, [&](const Tensor& tensor) {
        if (on_device(tensor)) {
          TORCH_CHECK(device_ < 0 || device_ == tensor.device().index(), SAME_DEVICE, "sim:", device_, " and ",
                      tensor.device(), "! (when checking ", schema_.name(), ")");
          device_ = tensor.device().index();
        } else if (writes(i) || (tensor.dim() && !index)) {
          host_tensor = true;
        }
        return tensor;
      });
      if (value.isDevice() && value.toDevice().type() == KIND && device_ < 0) device_ = index_of(value.toDevice());
    }
    if (device_ < 0) device_ = current_device;
    TORCH_CHECK(!host_tensor, SAME_DEVICE, "sim:", device_, " and cpu! (when checking ", schema_.name(), ")");
  }

  void arguments_to_host() {
    for (size_t i = 0; i < schema_.arguments().size(); i++) {
      auto& value = argument(i);
      if (value.isDevice()) {
        if (value.toDevice().type() == KIND) value = c10::Device(c10::kCPU);
      } else if (value.isGenerator()) {
        generator_ = value.toGenerator();
        TORCH_CHECK(generator_->device().type() == KIND, "Expected a 'sim' device type for generator but found '",
                    generator_->device(), "'");
        value = IValue();
      } else {
        value = map_tensors(value, [&](const Tensor& tensor) {
          if (!on_device(tensor)) return tensor;
          any_sparse_ |= tensor.is_sparse();
          auto host = aliases_.to_host(tensor);
          if (writes(i)) written_.emplace_back(host, tensor);
          else read_.push_back(tensor);
          return host;
        });
      }
    }
  }

  bool is_view() const {
    for (auto& result : schema_.returns())
      if (result.alias_info() && !result.alias_info()->isWrite()) return true;
    return false;
  }

  // Whether the host needs the values: item(), nonzero(), equal() …
  bool returns_to_host() const {
    if (op_.hasTag(at::Tag::data_dependent_output) || op_.hasTag(at::Tag::dynamic_output_shape)) return true;
    for (auto& result : schema_.returns()) {
      auto kind = result.type()->kind();
      if (kind == c10::TypeKind::NumberType || kind == c10::TypeKind::BoolType) return true;
    }
    return false;
  }

  // The kernel takes its place on the current stream, after all that the stream holds.
  void start() {
    Lock lock;
    auto stream = current_stream(device_);
    drain(lock, stream);
    number_ = launch(stream);
    auto note = [&](const Tensor& tensor, bool writes) {
      for_each_dense(tensor, [&](const Tensor& part) { access(part, stream, number_, writes); });
    };
    for (auto& tensor : read_) note(tensor, false);
    for (auto& [host, tensor] : written_) note(tensor, true);
  }

  void run_on_cpu() {
    BelowAutograd below;
    std::optional<PlayedByTheCPU> played;
    if (generator_ || op_.hasTag(at::Tag::nondeterministic_seeded))
      played.emplace(generator_ ? *generator_ : default_generator(device_));
    static auto convolution = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution", "");
    auto& op = schema_.name() == "aten::convolution_overrideable" ? convolution : op_;
    auto key = any_sparse_ ? c10::DispatchKey::SparseCPU : c10::DispatchKey::CPU;
    if (op.hasKernelForDispatchKey(key))
      op.redispatchBoxed(c10::DispatchKeySet(key), stack_);
    else
      op.callBoxed(stack_);
  }

  void results_to_device() {
    for (auto& [host, tensor] : written_) aliases_.follow(host, tensor);
    for (size_t i = stack_->size() - schema_.returns().size(); i < stack_->size(); i++)
      (*stack_)[i] = map_tensors((*stack_)[i], [&](const Tensor& host) {
        auto tensor = aliases_.to_device(host, c10::Device(KIND, device_));
        if (!is_view() && on_device(tensor)) {
          Lock lock;
          for_each_dense(tensor, [&](const Tensor& part) { access(part, current_stream(device_), number_, true); });
        }
        return tensor;
      });
  }

  static constexpr auto SAME_DEVICE = "Expected all tensors to be on the same device, but found at least two devices, ";
  const c10::OperatorHandle op_;
  const c10::FunctionSchema& schema_;
  Stack* stack_;
  size_t first_;
  int device_ = -1;
  uint64_t number_ = 0;
  bool reads_on_host_ = false, any_sparse_ = false;
  Aliases aliases_;
  std::vector<Tensor> read_;
  std::vector<std::pair<Tensor, Tensor>> written_;  // on the host, on the device
  std::optional<at::Generator> generator_;
};

inline void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) { Call(op, stack).run(); }

// ---- what the fallback cannot do ------------------------------------------------------------------------------------

inline Tensor empty(c10::SymIntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                    std::optional<c10::Device> device, std::optional<bool>,
                    std::optional<c10::MemoryFormat> memory_format) {
  c10::DeviceGuard guard(c10::Device(KIND, device ? index_of(*device) : current_device));
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &device_allocator,
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype),
                                   memory_format);
}

inline Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::ScalarType> dtype,
                            std::optional<c10::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(c10::Device(KIND, device ? index_of(*device) : current_device));
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                                           &device_allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

inline Tensor& set_to_part(Tensor& tensor, c10::Storage storage, c10::SymInt offset, c10::SymIntArrayRef size,
                           c10::SymIntArrayRef stride) {
  auto* impl = tensor.unsafeGetTensorImpl();
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  auto strides = stride.empty() ? c10::contiguous_strides(sizes) : c10::DimVector(C10_AS_INTARRAYREF_SLOW(stride));
  impl->set_storage_keep_dtype(storage);
  impl->set_sizes_and_strides(sizes, strides, offset.expect_int());
  return tensor;
}

inline Tensor& set_to_storage(Tensor& tensor, c10::Storage storage) {
  return set_to_part(tensor, storage, 0, {c10::SymInt(int64_t(storage.nbytes() / tensor.itemsize()))}, {});
}

inline Tensor& set_to_tensor(Tensor& tensor, const Tensor& other) {
  return set_to_part(tensor, other.storage(), other.storage_offset(), c10::fromIntArrayRefSlow(other.sizes()),
                     c10::fromIntArrayRefSlow(other.strides()));
}

inline Tensor& set_to_nothing(Tensor& tensor) {
  c10::DeviceGuard guard(tensor.device());
  c10::Storage none(c10::Storage::use_byte_size_t(), 0, device_allocator.allocate(0), &device_allocator, true);
  return set_to_part(tensor, none, 0, {c10::SymInt(0)}, {});
}

inline void record_stream(Tensor& tensor, c10::Stream stream) {
  device_allocator.recordStream(tensor.storage().data_ptr(), stream);
}

// The CPU's kernel has one argument more: the sizes of the bias.
inline std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& grad, const Tensor& input, const Tensor& weight, c10::SymIntArrayRef stride,
    c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed, c10::SymIntArrayRef output_padding,
    c10::SymInt groups, std::array<bool, 3> output_mask) {
  static auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution_backward", "");
  auto integers = [](c10::SymIntArrayRef values) {
    c10::List<int64_t> list;
    for (auto& value : values) list.push_back(value.expect_int());
    return IValue(list);
  };
  c10::List<bool> mask;
  for (bool wanted : output_mask) mask.push_back(wanted);
  c10::List<int64_t> bias_sizes;
  bias_sizes.push_back(grad.size(1));
  Stack stack{grad, input, weight, IValue(bias_sizes), integers(stride), integers(padding), integers(dilation),
              transposed, integers(output_padding), groups.expect_int(), mask};
  fallback(op, {}, &stack);
  return {stack[0].toTensor(), stack[1].toTensor(), stack[2].toTensor()};
}

// torch has fused cells for every accelerator and none for the CPU; by parts, so that autograd sees them.
inline std::tuple<Tensor, Tensor, Tensor> lstm_cell(const Tensor& input, const Tensor& hidden, const Tensor& state,
                                                    const std::optional<Tensor>& input_bias,
                                                    const std::optional<Tensor>& hidden_bias) {
  Tensor gates = hidden + input;
  if (input_bias && input_bias->defined()) gates = gates + *input_bias + *hidden_bias;
  auto parts = gates.chunk(4, 1);
  Tensor next = parts[1].sigmoid() * state + parts[0].sigmoid() * parts[2].tanh();
  return {parts[3].sigmoid() * next.tanh(), next, at::empty({0}, gates.options())};
}

inline std::tuple<Tensor, Tensor> gru_cell(const Tensor& input, const Tensor& hidden, const Tensor& state,
                                           const std::optional<Tensor>& input_bias,
                                           const std::optional<Tensor>& hidden_bias) {
  bool bias = input_bias && input_bias->defined();
  auto from_input = (bias ? input + *input_bias : input).chunk(3, 1);
  auto from_hidden = (bias ? hidden + *hidden_bias : hidden).chunk(3, 1);
  Tensor reset = (from_hidden[0] + from_input[0]).sigmoid(), keep = (from_hidden[1] + from_input[1]).sigmoid();
  Tensor fresh = (from_input[2] + reset * from_hidden[2]).tanh();
  return {(state - fresh) * keep + fresh, at::empty({0}, state.options())};
}

}  // namespace simulated
