// A device for tests where there is no GPU: two devices "stand_in:0" and "stand_in:1", whose memory is that of the CPU and
// whose kernels are those of the CPU, but with CUDA's rule that all tensors of a call lie on one device. Tensors without
// axes may lie on the CPU, and so may indices.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/library.h>
#include <torch/extension.h>

namespace {
constexpr auto KIND = c10::DeviceType::PrivateUse1;
thread_local c10::DeviceIndex current = 0;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return KIND; }
  c10::Device exchangeDevice(c10::Device d) const override { auto old = getDevice(); current = d.index() < 0 ? 0 : d.index(); return old; }
  c10::Device getDevice() const override { return {KIND, current}; }
  void setDevice(c10::Device d) const override { current = d.index() < 0 ? 0 : d.index(); }
  void uncheckedSetDevice(c10::Device d) const noexcept override { current = d.index() < 0 ? 0 : d.index(); }
  c10::Stream getStream(c10::Device d) const override { return c10::Stream(c10::Stream::DEFAULT, d); }
  c10::Stream getDefaultStream(c10::Device d) const override { return getStream(d); }
  c10::Stream exchangeStream(c10::Stream s) const override { return getStream(s.device()); }
  c10::DeviceIndex deviceCount() const noexcept override { return 2; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Alloc final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override { void* p = c10::alloc_cpu(n); return {p, p, &c10::free_cpu, {KIND, current}}; }
  c10::DeleterFnPtr raw_deleter() const override { return &c10::free_cpu; }
  void copy_data(void* to, const void* from, size_t n) const override { default_copy_data(to, from, n); }
};
Alloc alloc;
REGISTER_ALLOCATOR(KIND, &alloc);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { static at::Generator g = at::detail::getDefaultCPUGenerator(); return g; }
  bool isPinnedPtr(const void*) const override { return false; }
  bool isAvailable() const override { return true; }
  at::Device getDeviceFromPtr(void*) const override { return {KIND, current}; }
  void resizePrivateUse1Bytes(const c10::Storage& s, size_t n) const override {
    auto* impl = s.unsafeGetStorageImpl();
    auto fresh = impl->allocator()->allocate(n);
    if (impl->data()) std::memcpy(fresh.get(), impl->data(), std::min(n, impl->nbytes()));
    impl->set_data_ptr_noswap(std::move(fresh));
    impl->set_nbytes(n);
  }
};

at::Tensor here(const at::Tensor& t) {  // the same memory as a tensor of the CPU
  if (!t.defined() || t.device().is_cpu()) return t;
  return at::from_blob(t.storage().data_ptr() ? static_cast<char*>(t.storage().mutable_data()) + t.storage_offset() * t.itemsize() : nullptr, t.sizes(), t.strides(), [](void*) {}, t.options().device(at::kCPU));
}

at::Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(device.value_or(c10::Device(KIND, current)));
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &alloc, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), dtype_or_default(dtype), format);
}
at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(device.value_or(c10::Device(KIND, current)));
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &alloc, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), dtype_or_default(dtype));
}
at::Tensor copy_from(const at::Tensor& self, const at::Tensor& dst, bool) {
  here(dst).copy_(here(self));
  return dst;
}
at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& dst) { dst.resize_(self.sizes()); return copy_from(self, dst, false); }
at::Scalar local_scalar(const at::Tensor& t) { return here(t).item(); }
at::Tensor alias_of(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  auto out = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(self.storage()), self.key_set(), self.dtype());
  out.unsafeGetTensorImpl()->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), offset ? offset->expect_int() : self.storage_offset());
  return out;
}
at::Tensor as_strided(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::SymInt> offset) { return alias_of(self, size, stride, offset); }
at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) {
  auto v = here(self).view(C10_AS_INTARRAYREF_SLOW(size));
  return alias_of(self, c10::fromIntArrayRefSlow(v.sizes()), c10::fromIntArrayRefSlow(v.strides()), std::nullopt);
}
at::Tensor reshape_alias(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) { return alias_of(self, size, stride, std::nullopt); }
at::Tensor unfold(const at::Tensor& self, int64_t d, int64_t n, int64_t step) {
  auto v = here(self).unfold(d, n, step);
  return alias_of(self, c10::fromIntArrayRefSlow(v.sizes()), c10::fromIntArrayRefSlow(v.strides()), std::nullopt);
}
const at::Tensor& resize_(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(size));
  size_t need = (self.numel() + self.storage_offset()) * self.itemsize();
  if (need > self.storage().nbytes()) at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), need);
  return self;
}
at::Tensor& set_storage(at::Tensor& self, at::Storage s, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(s);
  auto sz = C10_AS_INTARRAYREF_SLOW(size);
  if (stride.empty() && !sz.empty()) { impl->set_sizes_contiguous(sz); impl->set_storage_offset(offset.expect_int()); }
  else impl->set_sizes_and_strides(sz, C10_AS_INTARRAYREF_SLOW(stride), offset.expect_int());
  return self;
}
at::Tensor& set_source(at::Tensor& self, at::Storage s) { int64_t n = s.nbytes() / self.itemsize(); std::vector<c10::SymInt> sz{n}, st{1}; return set_storage(self, s, 0, sz, st); }
at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& o) { auto a = o.sym_sizes().vec(), b = o.sym_strides().vec(); return set_storage(self, o.storage(), o.sym_storage_offset(), a, b); }
at::Tensor back(const at::Tensor& t, at::Device d) { return t.defined() ? t.to(d) : t; }
at::Tensor conv(const at::Tensor& x, const at::Tensor& w, const std::optional<at::Tensor>& b, c10::SymIntArrayRef s, c10::SymIntArrayRef p, c10::SymIntArrayRef d, bool t, c10::SymIntArrayRef op, c10::SymInt g) {
  auto bias = b && b->defined() ? std::optional<at::Tensor>(here(*b)) : std::nullopt;
  return back(at::convolution_symint(here(x), here(w), bias, s, p, d, t, op, g), x.device());
}
std::tuple<at::Tensor, at::Tensor, at::Tensor> conv_back(const at::Tensor& go, const at::Tensor& x, const at::Tensor& w, c10::SymIntArrayRef s, c10::SymIntArrayRef p, c10::SymIntArrayRef d, bool t, c10::SymIntArrayRef op, c10::SymInt g, std::array<bool, 3> mask) {
  std::vector<c10::SymInt> bs{w.sym_size(t ? 1 : 0) * (t ? g : c10::SymInt(1))};
  auto [a, b, c] = at::convolution_backward_symint(here(go), here(x), here(w), c10::OptionalArrayRef<c10::SymInt>(bs), s, p, d, t, op, g, mask);
  return {back(a, x.device()), back(b, x.device()), back(c, x.device())};
}
void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  std::optional<at::Device> seen; 
  auto name = op.schema().operator_name().name;
  bool lenient = name.find("index") != std::string::npos || name.find("copy") != std::string::npos || name.find("lstm") != std::string::npos;
  auto look = [&](const at::Tensor& t) {
    if (!t.defined() || t.dim() == 0 || lenient) return;
    TORCH_CHECK(!seen || *seen == t.device(), "Expected all tensors to be on the same device, but found at least two devices, ", *seen, " and ", t.device(), " (in ", name, ")");
    seen = t.device();
  };
  auto n = op.schema().arguments().size();
  if (name.find("aten::index") == 0) {  // indices may lie on the CPU, and not what is indexed
    const auto& self = (*stack)[stack->size() - n].toTensor();
    TORCH_CHECK(!self.is_cpu(), "indices should be either on cpu or on the same device as the indexed tensor (cpu) (two devices)");
  }
  for (auto i = stack->size() - n; i < stack->size(); ++i) {
    const auto& v = (*stack)[i];
    if (v.isTensor()) look(v.toTensor());
    else if (v.isTensorList()) for (const at::Tensor& t : v.toTensorVector()) look(t);
  }
  at::native::cpu_fallback(op, stack);
}
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty); m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from); m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar); m.impl("as_strided", as_strided); m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias); m.impl("unfold", unfold); m.impl("resize_", resize_);
  m.impl("set_.source_Storage", set_source); m.impl("set_.source_Storage_storage_offset", set_storage); m.impl("set_.source_Tensor", set_tensor);
  m.impl("convolution_overrideable", conv); m.impl("convolution_backward_overrideable", conv_back);
}
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("start", [] { static Hooks hooks; at::RegisterPrivateUse1HooksInterface(&hooks); });
  m.def("current", [] { return static_cast<int>(current); });
  m.def("use", [](int i) { current = i; });
}
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
