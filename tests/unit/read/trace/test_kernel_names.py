"""Short names of the kernels that an H200 ran with torch 2.11, and of some that others run."""

from __future__ import annotations

import pytest

from lightning_memprof.read.trace.kernel_names import kernel_name, kernel_names

ADD = "at::native::CUDAFunctor_add<float>"
MUL = "at::native::binary_internal::MulFunctor<float>"


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("at::native::f<(x->y), at::native::CUDAFunctor_add<float>>(int)", "f<CUDAFunctor_add<float>>"),
        ("::cub::scan<int>(x)", "::cub::scan"),
        (
            (
                "void at::native::vectorized_elementwise_kernel<8, at::native::bfloat16_copy_kernel_cuda(at::"
                "TensorIteratorBase&)::{lambda(float)#1}, std::array<char*, 2ul> >(int, at::native::"
                "bfloat16_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda(float)#1}, std::array<char*, 2ul>)"
            ),
            "vectorized_elementwise_kernel<bfloat16_copy_kernel_cuda<float>>",
        ),
        (
            (
                "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(at::"
                "TensorIteratorBase&)::{lambda()#3}::operator()() const::{lambda()#4}::operator()() const::"
                "{lambda(long)#1}, std::array<char*, 2ul>, 4, TrivialOffsetCalculator<1, unsigned int>, "
                "TrivialOffsetCalculator<1, unsigned int>, at::native::memory::LoadWithCast<1>, "
                "at::native::memory::"
                "StoreWithCast<1> >(int, "
                "at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda()#3}::"
                "operator()() const::{lambda()#4}::operator()() const::{lambda(long)#1}, std::array<char*, 2ul>, "
                "TrivialOffsetCalculator<1, unsigned int>, TrivialOffsetCalculator<1, unsigned int>, at::native::"
                "memory::LoadWithCast<1>, at::native::memory::StoreWithCast<1>)"
            ),
            "unrolled_elementwise_kernel<direct_copy_kernel_cuda<long>>",
        ),
        (
            (
                "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<at::native::"
                "CUDAFunctor_add<c10::BFloat16> >(at::TensorIteratorBase&, at::native::CUDAFunctor_add<c10::"
                "BFloat16> const&)::{lambda(int)#1}>(int, at::native::gpu_kernel_impl_nocast<at::native::"
                "CUDAFunctor_add<c10::BFloat16> >(at::TensorIteratorBase&, at::native::CUDAFunctor_add<c10::"
                "BFloat16> const&)::{lambda(int)#1})"
            ),
            "elementwise_kernel<CUDAFunctor_add<BFloat16>>",
        ),
        (
            (
                "void at::native::reduce_kernel<128, 4, at::native::ReduceOp<c10::BFloat16, at::native::"
                "func_wrapper_t<c10::BFloat16, at::native::sum_functor<c10::BFloat16, float, c10::BFloat16>::"
                "operator()(at::TensorIterator&)::{lambda(float, float)#1}>, unsigned int, c10::BFloat16, 4, 8> "
                ">(at::native::ReduceOp<c10::BFloat16, at::native::func_wrapper_t<c10::BFloat16, at::native::"
                "sum_functor<c10::BFloat16, float, c10::BFloat16>::operator()(at::TensorIterator&)::{lambda(float, "
                "float)#1}>, unsigned int, c10::BFloat16, 4, 8>)"
            ),
            "reduce_kernel<sum_functor<BFloat16>>",
        ),
        (
            (
                "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float, "
                "float,"
                " float, float>, unsigned int, float, 4, 4> >(at::native::ReduceOp<float, at::native::MeanOps<float, "
                ""
                "float, float, float>, unsigned int, float, 4, 4>)"
            ),
            "reduce_kernel<MeanOps<float>>",
        ),
        (
            (
                "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous "
                "namespace)::TensorListScalarListMetadata<float, 1>, at::native::(anonymous namespace)::"
                "BinaryOpScalarListFunctor<float, 1, 1, 0>, std::divides<float> >(at::native::(anonymous "
                "namespace)::"
                "TensorListScalarListMetadata<float, 1>, at::native::(anonymous namespace)::"
                "BinaryOpScalarListFunctor<float, 1, 1, 0>, std::divides<float>)"
            ),
            "multi_tensor_apply_kernel<BinaryOpScalarListFunctor<float>, divides>",
        ),
        (
            (
                "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous "
                "namespace)::TensorListMetadata<1>, at::native::(anonymous namespace)::UnaryOpFunctor<float, 1, 1, "
                "0>, at::native::_amp_foreach_non_finite_check_and_unscale_cuda_(c10::ArrayRef<at::Tensor>, at::"
                "Tensor&, at::Tensor const&)::{lambda()#1}::operator()() const::{lambda()#2}::operator()() const::"
                "{lambda(float)#1}>(at::native::(anonymous namespace)::TensorListMetadata<1>, at::native::(anonymous "
                ""
                "namespace)::UnaryOpFunctor<float, 1, 1, 0>, at::native::"
                "_amp_foreach_non_finite_check_and_unscale_cuda_(c10::ArrayRef<at::Tensor>, at::Tensor&, at::Tensor "
                ""
                "const&)::{lambda()#1}::operator()() const::{lambda()#2}::operator()() const::{lambda(float)#1})"
            ),
            "multi_tensor_apply_kernel<UnaryOpFunctor<float>, _amp_foreach_non_finite_check_and_unscale_cuda_>",
        ),
        (
            (
                "void at::native::vectorized_elementwise_kernel<8, at::native::(anonymous namespace)::"
                "launch_clamp_scalar(at::TensorIteratorBase&, c10::Scalar, c10::Scalar, at::native::detail::"
                "ClampLimits)::{lambda()#1}::operator()() const::{lambda()#9}::operator()() const::{lambda(c10::"
                "BFloat16)#1}, std::array<char*, 2ul> >(int, at::native::(anonymous namespace)::"
                "launch_clamp_scalar(at::TensorIteratorBase&, c10::Scalar, c10::Scalar, at::native::detail::"
                "ClampLimits)::{lambda()#1}::operator()() const::{lambda()#9}::operator()() const::{lambda(c10::"
                "BFloat16)#1}, std::array<char*, 2ul>)"
            ),
            "vectorized_elementwise_kernel<launch_clamp_scalar<BFloat16>>",
        ),
        (
            (
                "void at::native::vectorized_elementwise_kernel<8, at::native::BinaryFunctor<c10::BFloat16, c10::"
                "BFloat16, c10::BFloat16, at::native::(anonymous namespace)::threshold_kernel_impl<c10::"
                "BFloat16>(at::TensorIteratorBase&, c10::BFloat16, c10::BFloat16)::{lambda(c10::BFloat16, c10::"
                "BFloat16)#1}>, std::array<char*, 3ul> >(int, at::native::BinaryFunctor<c10::BFloat16, "
                "c10::BFloat16,"
                " c10::BFloat16, at::native::(anonymous namespace)::threshold_kernel_impl<c10::BFloat16>(at::"
                "TensorIteratorBase&, c10::BFloat16, c10::BFloat16)::{lambda(c10::BFloat16, c10::BFloat16)#1}>, "
                "std::"
                "array<char*, 3ul>)"
            ),
            "vectorized_elementwise_kernel<threshold_kernel_impl<BFloat16>>",
        ),
        (
            (
                "void (anonymous namespace)::elementwise_kernel_with_index<int, at::native::arange_cuda_out(c10::"
                "Scalar const&, c10::Scalar const&, c10::Scalar const&, at::Tensor&)::{lambda()#1}::operator()() "
                "const::{lambda()#4}::operator()() const::{lambda(long)#1}>(int, at::native::arange_cuda_out(c10::"
                "Scalar const&, c10::Scalar const&, c10::Scalar const&, at::Tensor&)::{lambda()#1}::operator()() "
                "const::{lambda()#4}::operator()() const::{lambda(long)#1}, function_traits<at::native::"
                "arange_cuda_out(c10::Scalar const&, c10::Scalar const&, c10::Scalar const&, at::Tensor&)::"
                "{lambda()#1}::operator()() const::{lambda()#4}::operator()() "
                "const::{lambda(long)#1}>::result_type*)"
            ),
            "elementwise_kernel_with_index<arange_cuda_out<long>>",
        ),
        (
            (
                "void (anonymous namespace)::softmax_warp_forward<c10::BFloat16, c10::BFloat16, float, 10, true, "
                "false>(c10::BFloat16*, c10::BFloat16 const*, int, int, int, bool const*, int, bool)"
            ),
            "softmax_warp_forward",
        ),
        (
            (
                "void at::native::(anonymous namespace)::cunn_SoftMaxForward<4, float, float, float, at::native::"
                "(anonymous namespace)::LogSoftMaxForwardEpilogue>(float*, float const*, int)"
            ),
            "cunn_SoftMaxForward<LogSoftMaxForwardEpilogue>",
        ),
        (
            (
                "void at::native::(anonymous namespace)::max_pool_forward_nchw<c10::BFloat16, int>(int, c10::"
                "BFloat16 const*, long, long, long, int, int, int, int, int, int, int, int, int, int, "
                "c10::BFloat16*,"
                " long*)"
            ),
            "max_pool_forward_nchw",
        ),
        (
            (
                "fmha_cutlassF_f32_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel<float, cutlass::"
                "arch::Sm80, true, 64, 64, 64, true, true>::Params)"
            ),
            "fmha_cutlassF_f32_aligned_64x64_rf_sm80",
        ),
        (
            (
                "void "
                "cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_128x128_32x4_nt_align2>(cutlass_80_te"
                "nsorop_bf16_s16816gemm_bf16_128x128_32x4_nt_align2::Params)"
            ),
            "cutlass_80_tensorop_bf16_s16816gemm_bf16_128x128_32x4_nt_align2",
        ),
        (
            (
                ""
                "_ZN17cutlass__5x_cudnn6KernelINS_4conv6kernel23ImplicitGemmConvolutionINS1_11threadblock22ImplicitGe"
                ""
                "mmMultistageINS_4gemm9GemmShapeILi64ELi128ELi32EEENS4_52Conv2dWgradOutputGradientTileAccessIteratorO"
                ""
                "ptimizedINS_11MatrixShapeILi64ELi32EEENS_10bfloat16_tENS_9transform29PitchLinearWarpRakedThreadMapIN"
                ""
                "S_16PitchLinearShapeILi64ELi32EEELi128ENSF_ILi8ELi4EEELi8EEENS_12AlignedArrayISC_Li8ELi16EEEEENSD_11"
                "threadblock25Regular"
            ),
            "conv::kernel::ImplicitGemmConvolution",
        ),
        (
            (
                "void cutlass__5x_cudnn::Kernel<cutlass__5x_cudnn::reduction::kernel::"
                "ReduceSplitK<cutlass__5x_cudnn::MatrixShape<4, 256>, cutlass__5x_cudnn::epilogue::thread::"
                "LinearCombination<cutlass__5x_cudnn::bfloat16_t, 8, float, float, (cutlass__5x_cudnn::epilogue::"
                "thread::ScaleType::Kind)0, (cutlass__5x_cudnn::FloatRoundStyle)2>, cutlass__5x_cudnn::reduction::"
                "thread::ReduceAdd<float, float, 8>, 4> >(cutlass__5x_cudnn::reduction::kernel::"
                "ReduceSplitK<cutlass__5x_cudnn::MatrixShape<4, 256>, cutlass__5x_cudnn::epilogue::thread::"
                "LinearCombination<cutlass__5x_cudnn::bfloat16_t, 8, float, float, (cutlass__5x_cudnn::epilogue::"
                "thread::ScaleType::Kind)0, (cutlass__5x_cudnn::FloatRoundStyle)2>, cutlass__5x_cudnn::reduction::"
                "thread::ReduceAdd<float, float, 8>, 4>::Params)"
            ),
            "cutlass__5x_cudnn::reduction::kernel::ReduceSplitK",
        ),
        (
            (
                "void cudnn::fusion::convert_dq_to_16bits<true>(void const*, void*, unsigned int, unsigned int, "
                "unsigned int, unsigned int, unsigned int, unsigned int, unsigned int, unsigned int, unsigned int, "
                "unsigned int, float const*, float const*, float const*, float*, void const*, void*, void*, bool, "
                "bool)"
            ),
            "cudnn::fusion::convert_dq_to_16bits",
        ),
        (
            (
                "void cublasLt::splitKreduce_kernel<32, 16, int, float, float, float, float, false, float, float, "
                "float, true, false, false, false>(cublasLt::cublasSplitKParams<float>, float const*, float const*, "
                ""
                "float*, float*, float const*, float const*, float const*, float const*, float*, void*, long, "
                "float*,"
                " int*, float*, float*, float const*, float const*, float const*, float const*, float const*)"
            ),
            "cublasLt::splitKreduce_kernel",
        ),
        (
            (
                "void at_cuda_detail::cub::detail::scan::DeviceScanKernel<at_cuda_detail::cub::detail::scan::"
                "policy_hub<long, long, long, unsigned int, at::cuda::cub::(anonymous namespace)::SumOp<long> >::"
                "Policy1000, long const*, long*, at_cuda_detail::cub::ScanTileState<long, true>, at::cuda::cub::"
                "(anonymous namespace)::SumOp<long>, at_cuda_detail::cub::detail::InputValue<long, long*>, unsigned "
                ""
                "int, long, false, long>(long const*, long*, at_cuda_detail::cub::ScanTileState<long, true>, int, "
                "at::cuda::cub::(anonymous namespace)::SumOp<long>, at_cuda_detail::cub::detail::InputValue<long, "
                "long*>, unsigned int)"
            ),
            "DeviceScanKernel<SumOp<long>>",
        ),
        (
            "nvjet_sm90_tst_64x8_64x16_2x4_h_bz_bias_TNT",
            "nvjet_sm90_tst_64x8_64x16_2x4_h_bz_bias_TNT",
        ),
        (
            "triton_per_fused_sum_threshold_backward_0",
            "triton_per_fused_sum_threshold_backward_0",
        ),
        (
            "nvjet_sm90_tst_64x32_64x16_4x2_h_bz_NNT",
            "nvjet_sm90_tst_64x32_64x16_4x2_h_bz_NNT",
        ),
        (
            "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
            "ncclDevKernel_AllReduce_Sum_f32_RING_LL",
        ),
        (
            (
                "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64, 128, 128, 4, false, "
                "false, "
                "cutlass::bfloat16_t, pytorch_flash::Flash_kernel_traits<64, 128, 128, 4, cutlass::bfloat16_t> >, "
                "false, true, "
                "false, false, true, true, false, false>(pytorch_flash::Flash_fwd_params)"
            ),
            "pytorch_flash::flash_fwd_kernel",
        ),
        (
            (
                "void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<"
                "flash::CollectiveMainloopFwdSm90<2> > > >"
                "(flash::Params)"
            ),
            "flash::FlashAttnFwdSm90",
        ),
        (
            (
                "std::enable_if<!(false), void>::type internal::gemvx::kernel<int, float, false, "
                "7>(cublasGemvParamsEx<int>)"
            ),
            "internal::gemvx::kernel",
        ),
        (
            (
                "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::WelfordOps<float, "
                "float, int, "
                "thrust::pair<float, float> >, unsigned int, float, 4> >(int)"
            ),
            "reduce_kernel<WelfordOps<float>>",
        ),
        (
            (
                "void at::native::vectorized_elementwise_kernel<4, "
                "at::native::sigmoid_kernel_cuda(at::TensorIteratorBase&)::"
                "'lambda'()::operator()() const::'lambda0'()::operator()() const::'lambda'(c10::complex<float>), "
                "at::detail::Array<char*, 2> >(int) [clone .kd]"
            ),
            "vectorized_elementwise_kernel<sigmoid_kernel_cuda<complex<float>>>",
        ),
        ("void (anonymous namespace)::softmax_warp_forward<float, 8>(float*)", "softmax_warp_forward"),
        ("void <unnamed>::scan(int)", "scan"),
        ("void at::native::(anonymous namespace)::foo_kernel<int>(int)", "foo_kernel"),
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
        (["f<a_16x16_tn>(a)", "f<a_32x16_tn>(b)", "g<1>"], ["f<…16x16…>", "f<…32x16…>", "g"]),
        (["f<int>(int)", "f<int>(long)"], ["f<…int)", "f<…long)"]),
        (["f<1>", "f<1, 2>", "f", "f<1>"], ["f<1>", "f<1, 2>", "f", "f<1>"]),
        (["f<g<1>, 2>()", "f<g<2>, 2>()"], ["f<…1…>", "f<…2…>"]),
        (
            [
                "void at::native::vectorized_elementwise_kernel<4, "
                f"at::native::{call}<float, float, float, {MUL} > >(int)"
                for call in ("AUnaryFunctor", "BinaryFunctor")
            ],
            [
                "vectorized_elementwise_kernel<4, AUnaryFunctor<MulFunctor<float>>>",
                "vectorized_elementwise_kernel<4, BinaryFunctor<MulFunctor<float>>>",
            ],
        ),
        (
            [
                f"void at::native::elementwise_kernel<128, {size}, at::native::gpu_kernel_impl<{ADD} >"
                f"(at::TensorIteratorBase&, {ADD} const&)::{{lambda(int)#1}}>(int)"
                for size in (2, 4)
            ],
            [f"elementwise_kernel<128, {size}, CUDAFunctor_add<float>>" for size in (2, 4)],
        ),
    ],
)
def test_kernels_of_one_short_name_are_told_apart(names: list[str], shown: list[str]) -> None:
    assert kernel_names(names) == shown
