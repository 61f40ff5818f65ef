// The simulated accelerator: what is registered with torch when this library is loaded. torch_sim.py makes `torch.sim`.
#include "collectives.h"

#include <ATen/NativeFunctions.h>
#include <ATen/autocast_mode.h>

namespace simulated {
namespace {

REGISTER_ALLOCATOR(KIND, &device_allocator)
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)
[[maybe_unused]] bool hooks_registered = (at::RegisterPrivateUse1HooksInterface(new Hooks), true);

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("record_stream", record_stream);
  library.impl("set_", set_to_nothing);
  library.impl("set_.source_Storage", set_to_storage);
  library.impl("set_.source_Storage_storage_offset", set_to_part);
  library.impl("set_.source_Tensor", set_to_tensor);
  library.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&fallback>());
  library.impl("convolution_backward_overrideable", convolution_backward);
  library.impl("_thnn_fused_lstm_cell", lstm_cell);
  library.impl("_thnn_fused_gru_cell", gru_cell);
}

// What reads or makes the parts of a sparse tensor; everything else goes by the fallback.
TORCH_LIBRARY_IMPL(_, SparsePrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, SparsePrivateUse1, library) {
  library.impl("_sparse_coo_tensor_with_dims_and_tensors", at::native::new_with_dims_and_tensor_sparse_symint);
  library.impl("_indices", at::native::_indices_sparse);
  library.impl("_values", at::native::_values_sparse);
  library.impl("indices", at::native::indices_sparse);
  library.impl("values", at::native::values_sparse);
  library.impl("_nnz", at::native::_nnz_sparse);
  library.impl("sparse_dim", at::native::sparse_dim_sparse);
  library.impl("dense_dim", at::native::dense_dim_sparse);
  library.impl("is_coalesced", at::native::is_coalesced_sparse);
  library.impl("_coalesced_", at::native::_coalesced_sparse_);
  library.impl("empty.memory_format", at::native::empty_sparse_symint);
  library.impl("empty_like", at::native::empty_like_sparse_coo);
  library.impl("clone", at::native::clone_sparse);
  library.impl("copy_", at::native::copy_sparse_wrapper_);
  library.impl("copy_sparse_to_sparse_", at::native::copy_sparse_);
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, library) {
  library.impl("_thnn_fused_lstm_cell", lstm_cell);
  library.impl("_thnn_fused_gru_cell", gru_cell);
}

// Autocast by torch's own lists of operators.
#define IN_LOWER_PRECISION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define IN_FLOAT32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define WITH_FLOAT32_RESULT(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) { library.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  AT_FORALL_LOWER_PRECISION_FP(IN_LOWER_PRECISION)
  AT_FORALL_FP32(IN_FLOAT32)
  AT_FORALL_FP32_SET_OPT_DTYPE(WITH_FLOAT32_RESULT)
}

// Copies resolve what is conjugated or negated only when it is read, as everywhere.
TORCH_LIBRARY_IMPL(aten, Conjugate, library) { library.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, library) { library.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

// ---- for torch_sim.py and process_group.py --------------------------------------------------------------------------

std::vector<std::string> take_violations() {
  Lock lock;
  return std::exchange(violations, {});
}

std::tuple<std::vector<std::string>, std::vector<int64_t>> take_host_waits() {
  Lock lock;
  std::tuple<std::vector<std::string>, std::vector<int64_t>> kinds_and_threads;
  for (auto& wait : std::exchange(host_waits, {})) {
    std::get<0>(kinds_and_threads).push_back(wait.kind);
    std::get<1>(kinds_and_threads).push_back(wait.thread);
  }
  return kinds_and_threads;
}

std::vector<int64_t> open_contexts() {
  std::vector<int64_t> devices;
  for (int device = 0; device < device_count(); device++)
    if (contexts >> device & 1) devices.push_back(device);
  return devices;
}

void check_host_access(const Tensor& tensor, bool writes) {
  Lock lock;
  host_access(tensor, writes);
}

TORCH_LIBRARY(simulated, library) {
  library.def("device_count() -> int", [] { return int64_t(device_count()); });
  library.def("seed(int seed, int device) -> ()",
              [](int64_t seed, int64_t device) { default_generator(device).set_current_seed(seed); });
  library.def("rng_state(int device) -> Tensor", [](int64_t device) { return default_generator(device).get_state(); });
  library.def("set_rng_state(Tensor state, int device) -> ()",
              [](const Tensor& state, int64_t device) { default_generator(device).set_state(state); });
  library.def("violations() -> str[]", take_violations);
  library.def("raise_violations(bool raises) -> ()", [](bool raises) { raise_violations = raises; });
  library.def("host_waits() -> (str[], int[])", take_host_waits);
  library.def("contexts() -> int[]", open_contexts);
  library.def("open_context(int device) -> ()", [](int64_t device) { open_context(int(device)); });
  library.def("this_thread() -> int", this_thread);
  library.def("refuse_host_waits(bool refuse) -> ()", [](bool refuse) { refuse_host_waits = refuse; });
  library.def("capture(bool begin) -> ()", [](bool begin) { capturing = begin; });
  library.def("is_capturing() -> bool", [] { return capturing; });
  library.def("host_access(Tensor tensor, bool writes) -> ()", check_host_access);
  library.def("host_address(int address) -> int",
              [](int64_t address) { return address ^ int64_t(DEVICE_BIT); });
  library.def("start_collective(Tensor[] inputs, Tensor[] outputs, int device, int stream) -> int", start_collective);
  library.def("collective_inputs(int id) -> Tensor[]", collective_inputs);
  library.def("end_collective(int id, Tensor[] results) -> ()", end_collective);
  library.def("collective_has_ended(int id) -> bool", collective_has_ended);
}

}  // namespace
}  // namespace simulated
