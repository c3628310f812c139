"""Names that users of the field expect: docs/coverage.md is made of them."""


def words(text: str) -> list[str]:
    """The words of a text."""
    return text.split()


TENSOR = words("""
    T abs acos acosh add all allclose alu any arange argmax argmin argsort as_param asin asinh assign
    atan atanh avg_pool2d backward batchnorm bfloat16 binary_crossentropy binary_crossentropy_logits
    bitcast bitwise_and bitwise_not bitwise_or bitwise_xor bool call callify cast cat ceil celu chunk
    clamp clip clone const const_like contiguous contiguous_backward conv2d conv_transpose2d copysign
    cos cosh cross_entropy cummax cummin cumprod cumsum custom_kernel data decode_hevc_frame detach
    device diag diagonal div dot double dropout dtype einsum element_size elu empty empty_like eq erf
    exp exp2 expand eye flatten flip float floor fmod from_blob from_url full full_like gather gelu
    glorot_uniform grad gradient half hardsigmoid hardswish hardtanh hash image_conv2d image_dot int
    interpolate invalids is_floating_point is_param is_param_ isclose isfinite isinf isnan item
    kaiming_normal kaiming_uniform keccak layernorm leaky_relu lerp linear linear_with_vars linspace log
    log10 log2 log_softmax logaddexp logcumsumexp logical_not logsigmoid logsumexp long lshift
    manual_seed masked_fill masked_select matmul max max_numel max_pool2d max_shape max_unpool2d maximum
    mean meshgrid min minimum mish mod mul multinomial nbytes ndim ne neg newton_schulz nll_loss nonzero
    normal normalize numel numpy one_hot ones ones_like pad pad_to permute pow prod qr quick_gelu rand
    rand_like randint randn randn_like random_bits randperm realize rearrange reciprocal relu relu6
    repeat repeat_interleave replace reshape roll round rshift rsqrt scaled_dot_product_attention
    scaled_uniform scatter scatter_reduce schedule_linear selu sequential shape shard shard_ shard_like
    short shrink shrink_to sigmoid sign silu sin sinh size softmax softmin softplus softsign sort
    sparse_categorical_crossentropy split sqrt square squeeze stack std std_mean sub sum svd swish tan
    tanh threefry to to_ tolist topk transpose tril triu trunc ufix unflatten unfold uniform unsqueeze
    uop uprod usum var var_mean view where zeros zeros_like __array__ __dlpack__ __dlpack_device__
    __array_namespace__ __float__ __int__ __index__ __contains__ __iter__ __getitem__ __setitem__ unique
    bincount searchsorted histc quantile median kthvalue mode norm vector_norm matrix_norm cross kron
    outer inner tensordot trace cov corrcoef rot90 take take_along_dim put_along_dim index_add
    index_copy scatter_add clamp_min clamp_max erfinv lgamma digamma i0 sinc nan_to_num nansum nanmean
    nanmax nanmin isposinf isneginf fmin fmax hypot heaviside floor_divide remainder cholesky solve
    solve_triangular inv det slogdet eigh lstsq pinv matrix_rank matrix_power expm fold pixel_shuffle
    grid_sample affine_grid adaptive_avg_pool2d adaptive_max_pool2d conv1d conv3d conv_transpose1d
    conv_transpose3d ctc_loss kl_div huber_loss smooth_l1_loss cosine_similarity embedding erfc atan2
    signbit nextafter from_dlpack
""")

NN = words("""
    BatchNorm BatchNorm2d BatchNorm3d Conv2d ConvTranspose2d Embedding GroupNorm InstanceNorm LSTMCell
    LayerNorm LayerNorm2d Linear RMSNorm Conv1d Conv3d ConvTranspose1d ConvTranspose3d BatchNorm1d
    Dropout LSTM GRU RNN GRUCell RNNCell MultiheadAttention TransformerEncoderLayer Sequential
    ModuleList clip_grad_norm_ clip_grad_value_ EMA GradScaler
""")

SCHEDULERS = words("""
    LambdaLR MultiplicativeLR StepLR MultiStepLR ConstantLR LinearLR ExponentialLR PolynomialLR
    CosineAnnealingLR CosineAnnealingWarmRestarts OneCycleLR ReduceLROnPlateau SequentialLR ChainedScheduler
""")

OPTIM = words("""
    Adam AdamW LAMB LARS Muon Optimizer OptimizerGroup SGD
""")

STATE = words("""
    TensorIO accept_filename fs_load fs_store get_parameters get_state_dict load_state_dict safe_load
    safe_load_metadata safe_save tar_extract torch_load zip_extract
""")

DTYPES = words("""
    all bfloat16 bool char default_float default_int double finfo float float16 float32 float64 floats
    fp8_fnuz fp8_ocp fp8e4m3 fp8e4m3fnuz fp8e5m2 fp8e5m2fnuz fp8s from_py half int int16 int16s int32
    int32s int64 int64s int8 int8s ints is_bool is_float is_int is_unsigned long short sints uchar uint
    uint16 uint32 uint64 uint8 uints ulong ushort void weakfloat weakint weaks
""")

TRANSFORMS = words("""
    grad value_and_grad vjp jvp vmap jacobian jacrev jacfwd hessian checkpoint stop_gradient
    custom_gradient detect_nan function scan
""")

# results that have no gradient: indices, bools, shapes, settings
FLAT = words("""
    all allclose any argmax argmin argsort bool char const device dtype element_size empty empty_like eq
    isclose isfinite isinf isnan item long short int is_floating_point is_param is_param_ logical_not lt
    gt ne manual_seed max_numel max_shape nbytes ndim nonzero numel numpy one_hot ones ones_like zeros
    zeros_like rand rand_like randint randn randn_like random_bits randperm arange linspace eye full
    full_like shape size tolist data multinomial bincount searchsorted histc matrix_rank isposinf
    isneginf signbit realize replace to_ hash keccak threefry uop unique mode __int__ __index__
    __float__ __contains__ __array__ __dlpack__ __dlpack_device__ __array_namespace__ uniform normal
    kaiming_normal kaiming_uniform glorot_uniform scaled_uniform invalids from_blob from_url from_dlpack
    meshgrid detach grad gradient backward ceil floor round trunc sign nextafter requires_grad heaviside
    floor_divide
""")
