"""Short names of the kernels that an H200 ran with torch 2.11, and of some that others run."""

from __future__ import annotations

import pytest

from lightning_memprof.read.trace.kernel_names import kernel_name, kernel_names

ADD = "at::native::CUDAFunctor_add<float>"
MUL = "at::native::binary_internal::MulFunctor<float>"
ITERATOR = "at::TensorIteratorBase&"
CALLS = "{lambda()#1}::operator()() const::{lambda()#4}::operator()() const::"
COPY = f"at::native::direct_copy_kernel_cuda({ITERATOR})::{CALLS}{{lambda(long)#1}}"
OFFSETS = "TrivialOffsetCalculator<1, unsigned int>, at::native::memory::LoadWithCast<1>"
ANONYMOUS = "at::native::(anonymous namespace)::"
SUM = "at::native::sum_functor<c10::BFloat16, float>::operator()(at::TensorIterator&)::{lambda(float, float)#1}"
SCALE = f"at::native::_amp_foreach_non_finite_check_and_unscale_cuda_(at::Tensor&)::{CALLS}{{lambda(float)#1}}"
CUDNN = "cutlass__5x_cudnn"
VECTORIZED = "void at::native::vectorized_elementwise_kernel"


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("at::native::f<(x->y), at::native::CUDAFunctor_add<float>>(int)", "f<CUDAFunctor_add<float>>"),
        ("::cub::scan<int>(x)", "::cub::scan"),
        (
            f"void at::native::unrolled_elementwise_kernel<{COPY}, std::array<char*, 2ul>, 4, {OFFSETS} >(int, {COPY})",
            "unrolled_elementwise_kernel<direct_copy_kernel_cuda<long>>",
        ),
        (
            (
                f"void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<{ADD} >({ITERATOR}, "
                f"{ADD} const&)::{{lambda(int)#1}}>(int)"
            ),
            "elementwise_kernel<CUDAFunctor_add<float>>",
        ),
        (
            (
                "void at::native::reduce_kernel<128, 4, at::native::ReduceOp<c10::BFloat16, "
                f"at::native::func_wrapper_t<c10::BFloat16, {SUM}>, unsigned int, c10::BFloat16, 4, 8> >(int)"
            ),
            "reduce_kernel<sum_functor<BFloat16>>",
        ),
        (
            (
                "void at::native::reduce_kernel<at::native::ReduceOp<float, at::native::WelfordOps<float, float, "
                "int, thrust::pair<float, float> >, unsigned int, float, 4> >(int)"
            ),
            "reduce_kernel<WelfordOps<float>>",
        ),
        (
            (
                f"void {ANONYMOUS}multi_tensor_apply_kernel<{ANONYMOUS}TensorListScalarListMetadata<float, 1>, "
                f"{ANONYMOUS}BinaryOpScalarListFunctor<float, 1, 1, 0>, std::divides<float> >(int)"
            ),
            "multi_tensor_apply_kernel<BinaryOpScalarListFunctor<float>, divides>",
        ),
        (
            f"void {ANONYMOUS}multi_tensor_apply_kernel<{ANONYMOUS}UnaryOpFunctor<float, 1, 1, 0>, {SCALE}>(int)",
            "multi_tensor_apply_kernel<UnaryOpFunctor<float>, _amp_foreach_non_finite_check_and_unscale_cuda_>",
        ),
        (
            (
                f"{VECTORIZED}<8, {ANONYMOUS}launch_clamp_scalar({ITERATOR}, c10::Scalar, "
                f"at::native::detail::ClampLimits)::{CALLS}{{lambda(c10::BFloat16)#1}}, std::array<char*, 2ul> >(int)"
            ),
            "vectorized_elementwise_kernel<launch_clamp_scalar<BFloat16>>",
        ),
        (
            (
                f"{VECTORIZED}<8, at::native::BinaryFunctor<float, float, float, {ANONYMOUS}"
                f"threshold_kernel_impl<float>({ITERATOR}, float)::{{lambda(float)#1}}>, std::array<char*, 3ul> >(int)"
            ),
            "vectorized_elementwise_kernel<threshold_kernel_impl<float>>",
        ),
        (
            f"void {ANONYMOUS}cunn_SoftMaxForward<4, float, float, float, {ANONYMOUS}LogSoftMaxForwardEpilogue>(int)",
            "cunn_SoftMaxForward<LogSoftMaxForwardEpilogue>",
        ),
        (
            "void (anonymous namespace)::softmax_warp_forward<c10::BFloat16, float, 10, true, false>(c10::BFloat16*)",
            "softmax_warp_forward",
        ),
        (
            (
                f"void {CUDNN}::Kernel<{CUDNN}::reduction::kernel::ReduceSplitK<{CUDNN}::MatrixShape<4, 256>, {CUDNN}::"
                f"epilogue::thread::LinearCombination<({CUDNN}::epilogue::ScaleType::Kind)0>, 4> >(x)"
            ),
            "cutlass__5x_cudnn::reduction::kernel::ReduceSplitK",
        ),
        (
            "_ZN17cutlass__5x_cudnn6KernelINS_4conv6kernel23ImplicitGemmConvolutionINS1_11threadblock22Implicit",
            "conv::kernel::ImplicitGemmConvolution",
        ),
        (
            "void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<flash::MainloopFwd<2> > > >(x)",
            "flash::FlashAttnFwdSm90",
        ),
        (
            "void cutlass::Kernel2<cutlass_80_tensorop_align2>(cutlass_80_tensorop_align2::Params)",
            "cutlass_80_tensorop_align2",
        ),
        (
            (
                "void at_cuda_detail::cub::detail::DeviceScanKernel<at_cuda_detail::cub::detail::policy_hub<long, "
                "at::cuda::cub::(anonymous namespace)::SumOp<long> >::Policy1000, long const*, at_cuda_detail::cub::"
                "ScanTileState<long, true>, at::cuda::cub::(anonymous namespace)::SumOp<long>>(long const*)"
            ),
            "DeviceScanKernel<SumOp<long>>",
        ),
        ("triton_per_fused_sum_threshold_backward_0", "triton_per_fused_sum_threshold_backward_0"),
        (
            "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
            "ncclDevKernel_AllReduce_Sum_f32_RING_LL",
        ),
        ("std::enable_if<!(false), void>::type internal::gemvx::kernel<int, 7>(int)", "internal::gemvx::kernel"),
        (
            (
                f"{VECTORIZED}<4, at::native::sigmoid_kernel_cuda(int)::'lambda'()::"
                "operator()() const::'lambda0'()::operator()() const::'lambda'(c10::complex<float>), "
                "at::detail::Array<char*, 2> >(int) [clone .kd]"
            ),
            "vectorized_elementwise_kernel<sigmoid_kernel_cuda<complex<float>>>",
        ),
        ("void <unnamed>::scan(int)", "scan"),
        ("Memset (Device)", "Memset (Device)"),
        ("model.py(30): <lambda>", "model.py(30): <lambda>"),
        ("autograd::engine::evaluate_function: MulBackward0", "autograd::engine::evaluate_function: MulBackward0"),
        ("at::f<" * 4000, "f<f>"),
    ],
)
def test_a_kernels_name_is_its_function_and_operation(name: str, shown: str) -> None:
    assert kernel_name(name) == shown


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        (["void f<1>(int)", "g"], ["f", "g"]),
        (["f<a_16x16_tn>(a)", "f<a_32x16_tn>(b)", "g<1>"], ["f", "f #2", "g"]),
        (["f<1>", "f<1, 2>", "f", "f<1>"], ["f<1>", "f<1, 2>", "f", "f<1>"]),
        (
            [
                f"{VECTORIZED}<4, at::native::{call}<float, float, float, {MUL} > >(int)"
                for call in ("AUnaryFunctor", "BinaryFunctor")
            ],
            [
                "vectorized_elementwise_kernel<4, AUnaryFunctor<MulFunctor<float>>>",
                "vectorized_elementwise_kernel<4, BinaryFunctor<MulFunctor<float>>>",
            ],
        ),
    ],
)
def test_kernels_of_one_short_name_are_told_apart(names: list[str], shown: list[str]) -> None:
    assert kernel_names(names) == shown
