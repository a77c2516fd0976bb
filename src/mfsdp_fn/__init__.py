"""mfsdp_fn: fully sharded data parallel training as a functional library."""

from .autodiff import saved_tensors_hooks, value_and_grad, vjp
from .dtensor import to_dtensors
from .errors import DonatedError, LayoutError, MfsdpError, OrderError, PlanError, StateError
from .layout import GlobalLayout, Range
from .layout_builder import (
    build_for_row_atomic,
    build_for_row_atomic_unpadding,
    build_for_tensor_atomic,
    build_row_atomic_layout,
)
from .mesh import AbstractMesh
from .module import functional_call, params_of
from .placement import (
    BlockAtomic,
    Partial,
    Placements,
    Replicate,
    RowAtomic,
    ShardLayout,
    TensorAtomic,
    ddp,
    hfsdp,
    hsdp,
    zero1,
    zero2,
    zero3,
)
from .plan import plan
from .precision import MixedPrecisionPolicy
from .runtime import ExecutionOrder, Phase, PrefetchOrder, RuntimePolicy
from .spec import GroupSpec, LeafSpec, ShardSpec
from .state import ShardState, Stage, UnitState, tree_map, zeros_like
from .transforms import (
    finish_grad_sync,
    launch,
    reduce,
    reduce_outer,
    shard,
    sync_model_weights,
    unshard,
    wait,
)

__version__ = "0.1.0"
