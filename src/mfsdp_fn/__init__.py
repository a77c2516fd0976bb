"""mfsdp_fn: fully sharded data parallel training as a functional library."""

from . import checkpoint, optim, testing
from .autodiff import ValueAndGrad, saved_tensors_hooks, value_and_grad
from .compiling import compile
from .dbuffer import DBuffer
from .dtensor import to_dtensors
from .errors import DonatedError, LayoutError, MfsdpError, OrderError, PlanError, SimulationError, StateError
from .gather_scatter import gather_to_owner, scatter_from_owner
from .grad_sync import finish_grad_sync, reduce, reduce_outer
from .group import GroupSpec
from .layout import GlobalLayout
from .layout_builder import (
    build_for_row_atomic,
    build_for_row_atomic_unpadding,
    build_for_tensor_atomic,
    build_row_atomic_layout,
)
from .layout_choice import LayoutChoice
from .mesh import AbstractMesh
from .model_weights import sync_model_weights
from .module import functional_call, params_of
from .owner_compute import owner_map
from .owner_packing import OwnerGatherPlan, OwnerScatterPlan
from .owner_planning import (
    GroupOwnerLayout,
    assign_owner_work,
    ns_cost_fn,
    owner_loads,
    plan_owners,
    select_ge_2d_params,
)
from .placement import (
    BlockAtomic,
    Partial,
    Placement,
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
from .pullback import Pullback, vjp
from .ranges import Range
from .runtime import ExecutionOrder, Phase, PrefetchOrder, RuntimePolicy
from .sharding import shard
from .spec import LeafSpec, ShardSpec
from .state import ShardState, Stage, UnitState, tree_map, zeros_like
from .unsharding import Pending, launch, unshard, wait

__version__ = "0.1.0"

__all__ = [
    "AbstractMesh",
    "BlockAtomic",
    "DBuffer",
    "DonatedError",
    "ExecutionOrder",
    "GlobalLayout",
    "GroupOwnerLayout",
    "GroupSpec",
    "LayoutChoice",
    "LayoutError",
    "LeafSpec",
    "MfsdpError",
    "MixedPrecisionPolicy",
    "OrderError",
    "OwnerGatherPlan",
    "OwnerScatterPlan",
    "Partial",
    "Pending",
    "Phase",
    "Placement",
    "Placements",
    "PlanError",
    "PrefetchOrder",
    "Pullback",
    "Range",
    "Replicate",
    "RowAtomic",
    "RuntimePolicy",
    "ShardLayout",
    "ShardSpec",
    "ShardState",
    "SimulationError",
    "Stage",
    "StateError",
    "TensorAtomic",
    "UnitState",
    "ValueAndGrad",
    "assign_owner_work",
    "build_for_row_atomic",
    "build_for_row_atomic_unpadding",
    "build_for_tensor_atomic",
    "build_row_atomic_layout",
    "checkpoint",
    "compile",
    "ddp",
    "finish_grad_sync",
    "functional_call",
    "gather_to_owner",
    "hfsdp",
    "hsdp",
    "launch",
    "ns_cost_fn",
    "optim",
    "owner_loads",
    "owner_map",
    "params_of",
    "plan",
    "plan_owners",
    "reduce",
    "reduce_outer",
    "saved_tensors_hooks",
    "scatter_from_owner",
    "select_ge_2d_params",
    "shard",
    "sync_model_weights",
    "testing",
    "to_dtensors",
    "tree_map",
    "unshard",
    "value_and_grad",
    "vjp",
    "wait",
    "zero1",
    "zero2",
    "zero3",
    "zeros_like",
]
