// Tensors on device "cuda" whose memory is the host's: every operator that knows the CPU is registered for CUDA
// too, and runs on host tensors over the same memory. For trying code of a GPU where there is none.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cstring>
#include <memory>
#include <string>
#include <unordered_set>
#include <vector>

namespace {

using c10::IValue;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static c10::Device only() { return c10::Device(c10::kCUDA, 0); }
  static c10::Stream plain() { return c10::Stream(c10::Stream::DEFAULT, only()); }
  c10::DeviceType type() const override { return c10::kCUDA; }
  c10::Device exchangeDevice(c10::Device) const override { return only(); }
  c10::Device getDevice() const override { return only(); }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return plain(); }
  c10::Stream getDefaultStream(c10::Device) const override { return plain(); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return plain(); }
  c10::Stream getNewStream(c10::Device, int) const override { return plain(); }
  c10::Stream exchangeStream(c10::Stream) const override { return plain(); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};

struct Hooks final : at::CUDAHooksInterface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  int getNumGPUs() const override { return 1; }
  c10::DeviceIndex current_device() const override { return 0; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  void deviceSynchronize(c10::DeviceIndex) const override {}
  at::Generator getNewGenerator(c10::DeviceIndex = -1) const override {
    return at::make_generator<at::CPUGeneratorImpl>();
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex = -1) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  long versionCuDNN() const override { return 0; }
  long versionRuntimeCuDNN() const override { return 0; }
  long versionCuDNNFrontend() const override { return 0; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
};

void forget(void* held) { delete static_cast<c10::Storage*>(held); }

// the same bytes as a storage elsewhere, which keeps the first one alive
c10::Storage moved(const c10::Storage& from, c10::Device to) {
  void* data = from.nbytes() == 0 ? nullptr : from.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get();
  c10::DataPtr pointer(data, new c10::Storage(from), &forget, to);
  const bool host = to.type() == c10::kCPU;  // there operators may resize what they write to
  return c10::Storage(
      c10::Storage::use_byte_size_t(), from.nbytes(), std::move(pointer), host ? c10::GetCPUAllocator() : nullptr, host);
}

at::Tensor shaped(at::Tensor out, const at::Tensor& like) {
  auto* made = out.unsafeGetTensorImpl();
  made->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  made->_set_conj(like.is_conj());
  made->_set_neg(like.is_neg());
  if (like.unsafeGetTensorImpl()->is_wrapped_number()) made->set_wrapped_number(true);
  return out;
}

at::Tensor fresh(const at::Tensor& x, c10::Device to, c10::DispatchKey key) {
  return shaped(at::detail::make_tensor<c10::TensorImpl>(moved(x.storage(), to), c10::DispatchKeySet(key), x.dtype()), x);
}

at::Tensor view_of(const at::Tensor& base, const at::Tensor& like) {
  c10::Storage same = base.storage();
  return shaped(at::detail::make_tensor<c10::TensorImpl>(
                    c10::TensorImpl::VIEW, std::move(same), base.key_set(), like.dtype()), like);
}

at::Tensor on_host(const at::Tensor& x) {
  if (!x.defined() || x.device().type() != c10::kCUDA) return x;
  return fresh(x, c10::Device(c10::kCPU), c10::DispatchKey::CPU);
}

at::Tensor on_device(const at::Tensor& x) {
  if (!x.defined() || x.device().type() != c10::kCPU) return x;
  return fresh(x, Guard::only(), c10::DispatchKey::CUDA);
}

IValue given(const IValue& value) {
  if (value.isTensor()) return on_host(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> out;
    for (const at::Tensor& x : value.toTensorVector()) out.push_back(on_host(x));
    return out;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> out;
    const auto listed = value.toOptionalTensorList();
    for (size_t i = 0; i < listed.size(); ++i) {
      const std::optional<at::Tensor> x = listed.get(i);
      out.push_back(x.has_value() ? std::optional<at::Tensor>(on_host(*x)) : std::nullopt);
    }
    return out;
  }
  if (value.isDevice() && value.toDevice().type() == c10::kCUDA) return c10::Device(c10::kCPU);
  return value;
}

// a tensor that an operator has written to, and perhaps given other sizes, as its copy on the host is now
void follow(const at::Tensor& x, const at::Tensor& host) {
  auto* storage = x.storage().unsafeGetStorageImpl();
  auto* source = host.storage().unsafeGetStorageImpl();
  if (source->nbytes() != storage->nbytes()) {
    void* data = source->nbytes() == 0 ? nullptr : source->_mutable_data_ptr_no_checks().get();
    storage->set_data_ptr_noswap(
        c10::DataPtr(data, new c10::Storage(host.storage()), &forget, Guard::only()));
    storage->set_nbytes(source->nbytes());
  }
  if (x.sizes() != host.sizes() || x.strides() != host.strides() || x.storage_offset() != host.storage_offset())
    x.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
}

bool waits_are_errors = false;

// operators that wait for a device, as torch.cuda.set_sync_debug_mode knows them
void look_for_waits(const c10::OperatorHandle& op, const std::vector<IValue>& given) {
  const std::string& name = op.operator_name().name;
  bool waits = name == "aten::_local_scalar_dense" || name == "aten::nonzero" || name == "aten::masked_select";
  if (name == "aten::copy_")
    waits = given[0].toTensor().device() != given[1].toTensor().device() && !given[2].toBool();
  TORCH_CHECK(!waits, "called a synchronizing CUDA operation: ", name);
}

// which argument a result is (written to) or is a view of; -1 for a new one
int origin(const c10::FunctionSchema& schema, const c10::Argument& result) {
  if (result.alias_info() == nullptr) return -1;
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const auto* alias = schema.arguments()[i].alias_info();
    if (alias != nullptr && alias->beforeSets() == result.alias_info()->beforeSets()) return static_cast<int>(i);
  }
  return -1;
}

void run_on_host(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const size_t count = schema.arguments().size();
  std::vector<IValue> originals(stack->end() - static_cast<std::ptrdiff_t>(count), stack->end());
  if (waits_are_errors) look_for_waits(op, originals);
  torch::jit::drop(*stack, count);
  std::vector<std::pair<at::Tensor, at::Tensor>> written;
  for (size_t i = 0; i < count; ++i) {
    stack->push_back(given(originals[i]));
    const auto* alias = schema.arguments()[i].alias_info();
    if (alias != nullptr && alias->isWrite() && originals[i].isTensor() && originals[i].toTensor().is_cuda())
      written.emplace_back(originals[i].toTensor(), stack->back().toTensor());
  }
  {
    at::AutoDispatchBelowAutograd below;
    c10::impl::ExcludeDispatchKeyGuard plain(c10::autocast_dispatch_keyset);
    op.callBoxed(stack);
  }
  for (const auto& [x, host] : written) follow(x, host);
  const size_t results = schema.returns().size();
  for (size_t i = 0; i < results; ++i) {
    IValue& out = (*stack)[stack->size() - results + i];
    const auto& result = schema.returns()[i];
    const int from = origin(schema, result);
    if (from >= 0 && result.alias_info()->isWrite()) {
      out = originals[static_cast<size_t>(from)];
    } else if (out.isTensor()) {
      const at::Tensor& x = out.toTensor();
      if (from >= 0 && originals[static_cast<size_t>(from)].isTensor() && x.defined()) {
        const at::Tensor& base = originals[static_cast<size_t>(from)].toTensor();
        out = base.device().type() == c10::kCUDA ? view_of(base, x) : on_device(x);
      } else {
        out = on_device(x);
      }
    } else if (out.isTensorList()) {
      c10::List<at::Tensor> all;
      for (const at::Tensor& x : out.toTensorVector()) all.push_back(on_device(x));
      out = all;
    }
  }
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef sizes,
                        at::IntArrayRef strides) {
  auto* made = self.unsafeGetTensorImpl();
  made->set_storage_keep_dtype(std::move(source));
  std::vector<int64_t> steps(strides.begin(), strides.end());
  if (steps.size() != sizes.size()) {
    steps.assign(sizes.size(), 1);
    for (size_t i = sizes.size(); i-- > 1;) steps[i - 1] = steps[i] * sizes[i];
  }
  made->set_sizes_and_strides(sizes, steps, offset);
  return self;
}

at::Tensor& set_whole(at::Tensor& self, at::Storage source) {
  const auto count = static_cast<int64_t>(source.nbytes() / self.dtype().itemsize());
  return set_storage(self, std::move(source), 0, {count}, {});
}

struct Silent final : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

void install() {
  Silent silent;  // that kernels of a build for CUDA give way is meant
  c10::WarningUtils::WarningHandlerGuard quiet(&silent);
  static Guard guard;
  static std::vector<std::unique_ptr<torch::Library>> kept;
  if (!kept.empty()) return;
  // hooks are made once in a process, and importing torch may have made those of a build for CUDA: neither they
  // nor ours hold data, so that they become ours by their table of functions
  static Hooks hooks;
  auto& made = const_cast<at::CUDAHooksInterface&>(at::detail::getCUDAHooks());
  std::memcpy(static_cast<void*>(&made), static_cast<void*>(&hooks), sizeof(void*));
  c10::impl::device_guard_impl_registry[static_cast<size_t>(c10::kCUDA)].store(&guard);
  const std::unordered_set<std::string> always = {"aten::copy_"};
  const std::unordered_set<std::string> never = {
      "aten::set_.source_Storage", "aten::set_.source_Storage_storage_offset"};
  auto library = std::make_unique<torch::Library>(
      torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    const std::string full = name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
    if (name.name.rfind("aten::", 0) != 0 || never.count(full) != 0) continue;
    const auto handle = c10::Dispatcher::singleton().findSchema(name);
    if (!handle.has_value()) continue;
    const bool known = handle->hasKernelForDispatchKey(c10::DispatchKey::CPU) ||
                       handle->hasKernelForDispatchKey(c10::DispatchKey::CUDA) || always.count(full) != 0;
    if (known) library->impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
  }
  library->impl("aten::set_.source_Storage", torch::CppFunction(TORCH_FN(set_whole)));
  library->impl("aten::set_.source_Storage_storage_offset", torch::CppFunction(TORCH_FN(set_storage)));
  kept.push_back(std::move(library));
}

}  // namespace

TORCH_LIBRARY(linalg_dsl_stand_in, m) {
  m.def("install() -> ()", &install);
  m.def("refuse_waits(bool refused) -> ()", [](bool refused) { waits_are_errors = refused; });
}
