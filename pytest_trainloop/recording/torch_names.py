"""The names of torch's functions, grouped by what the functions do.

A mode knows a call by the name of its function. Every group is here once, so that a new norm or an alias is added in
one place. Modules take a group, or unions and differences of groups and say why they differ.
"""

from __future__ import annotations


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Loss functions of torch.nn.functional

CLASS_LOSSES = _names("cross_entropy nll_loss")
"""The target of an example is one class; what equals ``ignore_index`` is left out."""

BINARY_LOSSES = _names("binary_cross_entropy binary_cross_entropy_with_logits")

DISTANCE_LOSSES = _names("mse_loss l1_loss smooth_l1_loss huber_loss")
"""Input and target have the same shape, and may change places."""

SIGN_LOSSES = _names("cosine_embedding_loss margin_ranking_loss hinge_embedding_loss soft_margin_loss")
"""Targets are 1 and -1."""

LOSSES = (
    CLASS_LOSSES
    | BINARY_LOSSES
    | DISTANCE_LOSSES
    | SIGN_LOSSES
    | _names(
        """kl_div gaussian_nll_loss poisson_nll_loss ctc_loss triplet_margin_loss triplet_margin_with_distance_loss
        multi_margin_loss multilabel_margin_loss multilabel_soft_margin_loss"""
    )
)

# What is made of a tensor

SHAPE_ONLY = _names(
    """zeros_like ones_like empty_like full_like rand_like randn_like randint_like new_zeros new_ones new_empty new_full
    new_empty_strided"""
)
"""They take shape, dtype and device of a tensor, and none of its values."""

UNSET = _names("empty empty_like empty_strided empty_permuted new_empty new_empty_strided resize_ resize_as_")
"""What they give holds whatever stood in memory, until it is written to: ``Normal.rsample`` draws into it."""

# Layers

SOFTMAXES = _names("softmax log_softmax")

ACTIVATIONS = SOFTMAXES | _names(
    """sigmoid log_sigmoid tanh relu relu6 gelu silu softplus elu selu celu mish hardsigmoid leaky_relu log exp
    softmin"""
)

HALF_OPEN_ACTIVATIONS = _names("relu relu6 gelu silu softplus")
"""Their results do not fall far below 0."""

DROPOUTS = _names(
    """dropout dropout_ dropout1d dropout2d dropout3d alpha_dropout alpha_dropout_ feature_dropout feature_dropout_
    feature_alpha_dropout feature_alpha_dropout_"""
)

RUNNING_NORMALISATIONS = _names("batch_norm instance_norm")
"""Those that may keep running statistics."""

NORMALISATIONS = RUNNING_NORMALISATIONS | _names("group_norm layer_norm rms_norm")

TRANSPOSED_CONVOLUTIONS = _names("conv_transpose1d conv_transpose2d conv_transpose3d")
CONVOLUTIONS = TRANSPOSED_CONVOLUTIONS | _names("conv1d conv2d conv3d")

PRODUCTS = _names("matmul mm bmm einsum linear")
ATTENTION = _names("scaled_dot_product_attention multi_head_attention_forward")
RECURRENT = _names("lstm gru rnn_tanh rnn_relu")
EMBEDDINGS = _names("embedding embedding_bag")

MEAN_POOLS_1D = _names("adaptive_avg_pool1d avg_pool1d")
MAX_POOLS_1D = _names("adaptive_max_pool1d max_pool1d")
POOLS_1D = MEAN_POOLS_1D | MAX_POOLS_1D

# Entries moved

RESHAPES = _names("view reshape flatten unflatten view_as reshape_as")
"""Entries keep their order in memory."""

TRANSPOSES = _names("transpose t T mT permute swapaxes swapdims movedim moveaxis")

VIEWS = (
    RESHAPES
    | TRANSPOSES
    | _names("""squeeze unsqueeze ravel chunk split tensor_split unbind expand expand_as narrow select contiguous""")
)

INDEXING = _names("__getitem__ index_select masked_select gather take_along_dim flip roll repeat diagonal diag")
"""Some entries, or all in another order."""

DTYPE_CASTS = _names("float double half bfloat16 type type_as")
CASTS = DTYPE_CASTS | _names("clone to cuda cpu detach data requires_grad_ alias __deepcopy__ pin_memory")
"""The same entries in another tensor: of another dtype, on another device, without a history."""

JOINS = _names("stack cat")
MASKING = _names("masked_fill where setitem nan_to_num")
"""Some entries are replaced."""

SCATTERS = _names("index_add index_add_ scatter_add scatter_add_ scatter_reduce scatter_reduce_ segment_reduce")

# Arithmetic

ADDITIONS = _names("add radd __add__ __radd__")
SUBTRACTIONS = _names("sub rsub subtract __sub__ __rsub__")
MULTIPLICATIONS = _names("mul rmul multiply __mul__ __rmul__")
DIVISIONS = _names("div truediv true_divide divide __truediv__ __div__")
RECIPROCALS = _names("reciprocal rdiv __rdiv__ __rtruediv__ rtruediv")
NEGATIONS = _names("neg __neg__")

IN_PLACE_OPERATORS = _names("__iadd__ __isub__ __imul__ __itruediv__ __idiv__ __setitem__")

EXTREMES = _names("max amax min amin")
REDUCTIONS = EXTREMES | _names("mean nanmean sum nansum logsumexp median norm vector_norm std var std_mean var_mean")

EQUALITIES = _names("eq ne __eq__ __ne__ isclose")
FINITENESS_TESTS = _names("isnan isinf isfinite")
EXTREME_PLACES = _names("argmax argmin")
"""They give the place of an extreme."""

CLAMPS = _names("clamp clip clamp_min clamp_max")
ORDER_COMPARISONS = _names("gt lt ge le __gt__ __lt__ __ge__ __le__")
ROUNDINGS = _names("round round_ floor floor_ ceil ceil_ trunc trunc_ fix sign sign_ sgn heaviside")
"""Constant but for jumps."""

UNBOUNDED_SLOPES = _names(
    """sqrt rsqrt norm vector_norm linalg_norm linalg_vector_norm cdist dist std pow __pow__ div __truediv__ true_divide
    reciprocal log log2 log10 log1p acos asin arccos arcsin atanh acosh atan2 exp cosine_similarity normalize"""
)
"""Where several took the same tensor, one of them made its gradient infinite."""

# Random numbers

SAMPLES = _names("multinomial bernoulli normal poisson binomial")
"""Draws from a distribution that is given."""

DRAWS = _names(
    """rand randn rand_like randn_like randint randint_like normal normal_ uniform_ random_ exponential_ log_normal_
    cauchy_ geometric_ bernoulli_"""
)
"""Fresh random numbers, whatever the values of what they are given."""

ORDERINGS = _names("sort argsort topk msort cdist pdist argmax argmin")
"""Entries get another partner by their values, or every other one as a partner."""

# No computation

ATTRIBUTES = _names("__get__ __set__")
"""Of a tensor, read or set."""

CONSTANT_ATTRIBUTES = _names("grad shape dtype device requires_grad grad_fn is_leaf layout names")
"""Attributes whose reading makes no tensor of the one that has them."""

SIZES = _names("size dim numel")
AUTOGRAD_CALLS = _names("backward grad register_hook retain_grad")

TO_PYTHON = _names("item tolist numpy __float__ __int__ __complex__ __index__ __array__ __bool__ __format__")
"""Values leave torch."""

SET_GRAD_ENABLED = "_set_grad_enabled"
RECORD_FUNCTION = "_record_function"
"""How the names of the profiler's marks begin."""

UNSCALING = "_amp_foreach_non_finite_check_and_unscale_"
"""What a gradient scaler divides gradients by."""

ZEROING = _names("zero_ _foreach_zero_")

# Operations of aten, as dispatch modes see them

ATEN_COMPARISONS = _names("gt lt ge le")
ATEN_PICKS = _names("topk sort max min kthvalue median nanmedian")
"""They give entries and their places."""

ATEN_DRAWS = _names("rand normal_ uniform_ bernoulli exponential_ multinomial dropout")
"""Parts of the names of those that draw."""

ATEN_FILLS = _names("normal_ uniform_ random_ exponential_ bernoulli_ geometric_ cauchy_ log_normal_")
"""They fill a tensor with what they draw."""

ATEN_OPAQUE = _names("attention rnn lstm gru miopen cudnn")
"""Parts of the names of kernels that may draw and are marked so, whatever they do."""

ATEN_PRODUCTS = _names(
    """mm addmm bmm baddbmm addbmm mv addmv dot linear convolution convolution_backward convolution_overrideable
    _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward
    _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_backward
    _scaled_dot_product_efficient_attention _scaled_dot_product_efficient_attention_backward
    _scaled_dot_product_cudnn_attention _scaled_dot_product_cudnn_attention_backward"""
)
"""Operations whose inputs and outputs low precision rounds, whatever surrounds them."""
