"""The rules of parallel plans: what a plan needs from the model, the batch and its other keys.

An impossible plan is rejected with all its reasons, before anything starts. No torch here.
"""

from __future__ import annotations

from collections.abc import Iterator

from models.pretrain.plan import ParallelPlan, PlanError, Sizes
from models.pretrain.training import TrainingOptions

Rule = tuple[bool, str]
"""Whether the plan obeys it, and the reason to reject it otherwise."""


def check(plan: ParallelPlan, sizes: Sizes, options: TrainingOptions, processes: int | None = None) -> None:
    """Checks that the model, the processes and a training with `options` can follow `plan`.

    Raises:
        PlanError: with every reason.
    """
    reasons = problems(plan, sizes, batch_size=options.batch_size, processes=processes)
    if plan.grad_compression == "onebit":
        unfit = "grad_compression=onebit does not go with these options:"
        if options.optimizer != "adamw":
            reasons.append(f"{unfit} optimizer is {options.optimizer!r}, expected 'adamw'")
        if options.clip_norm:
            reasons.append(
                f"{unfit} clip_norm is {options.clip_norm}, expected 0: no process sees the whole gradient"
            )
    if reasons:
        raise PlanError(f"plan {plan}: " + "; ".join(reasons))


def problems(plan: ParallelPlan, sizes: Sizes, *, batch_size: int, processes: int | None = None) -> list[str]:
    """Every reason why the model and the processes cannot follow `plan`.

    Args:
        batch_size: rows of a global batch.
        processes: their number, or None where they will be started to fit.
    """
    needs = f"pp={plan.pp} · dp={plan.dp} · cp={plan.cp} · tp={plan.tp} need {plan.processes} processes"
    rules = [
        (processes in (None, plan.processes), f"{needs}, there are {processes}"),
        *_model_parallel(plan, sizes),
        *(_pipeline(plan, sizes) if plan.pp > 1 else _no_pipeline(plan)),
        *_data_parallel(plan),
        *_documents(plan, sizes),
        *_batch(plan, batch_size),
    ]
    return [reason for obeyed, reason in rules if not obeyed]


def _model_parallel(plan: ParallelPlan, sizes: Sizes) -> Iterator[Rule]:
    """The rules of tp, sequence, loss_parallel, cp, ep and fp8."""
    tp, cp, ep, heads = plan.tp, plan.cp, plan.ep, sizes.heads // plan.tp
    if tp > 1:
        yield sizes.tensor, "tp needs a model that says how its matrices split (its `layout`)"
        yield sizes.heads % tp == 0, f"tp={tp} must divide the {sizes.heads} heads"
        yield sizes.kv_heads % tp == 0, f"tp={tp} must divide the {sizes.kv_heads} heads of keys and values"
        yield sizes.hidden % tp == 0, f"tp={tp} must divide the {sizes.hidden} hidden features"
        selective = plan.activation_checkpoint == "selective"
        limit = "torch cannot compile selective recomputation of matrices that tp splits"
        yield (
            not (plan.compile and selective),
            f"tp={tp} with compile: {limit}; use activation_checkpoint=full, or compile=false",
        )
    if plan.sequence:
        yield tp > 1, "sequence splits over the tp ranks: it needs tp of 2 or more"
        yield sizes.length > 0, "sequence needs a model whose sequences can be split"
        yield sizes.length % (tp * cp) == 0, f"tp·cp={tp * cp} must divide the {sizes.length} tokens"
    if plan.loss_parallel:
        yield tp > 1, "loss_parallel needs tp of 2 or more"
        yield sizes.head, "loss_parallel needs a model that says what its head is (its `layout`)"
    if cp > 1:
        known = sizes.heads > 0 and sizes.attention
        yield known, "cp needs a model that says where its attention is (its `layout`)"
        yield heads % cp == 0, f"cp={cp} must divide the {heads} heads of a tp rank"
        yield sizes.length > 0, "cp needs a model whose sequences can be split"
        yield sizes.length % cp == 0, f"cp={cp} must divide the {sizes.length} tokens"
    if ep > 1:
        yield sizes.experts > 0, "ep needs a model with experts"
        yield plan.dp % ep == 0, f"ep={ep} must divide dp={plan.dp}"
        yield sizes.experts % ep == 0, f"ep={ep} must divide the {sizes.experts} experts"
        twice = "zero shards experts inside a block, which selective recomputation cannot repeat"
        selective = plan.activation_checkpoint == "selective"
        yield (
            plan.zero < 2 or not selective,
            f"ep with zero={plan.zero}: {twice}; use activation_checkpoint=full",
        )
        yield not plan.shards, "ep says which dp ranks share experts: shards goes with ep=1"

    if plan.precision == "fp8":
        yield sizes.tensor, "fp8 needs a model that says which its matrices are (its `layout`)"
        yield tp == 1, "fp8 goes with tp=1: the scale of a matrix is that of all of it"
        apart = plan.pp == 1 or plan.schedule not in ("zero-bubble", "zbv")
        yield (
            apart,
            f"{plan.schedule} needs the gradients of inputs and weights apart, fp8 computes both at once",
        )
        yield "cpu" not in plan.devices, "fp8 needs a GPU for every stage, devices names cpu"


def _pipeline(plan: ParallelPlan, sizes: Sizes) -> Iterator[Rule]:
    stages, layers = plan.virtual_stages, sizes.layers
    yield not sizes.tied, "stages cannot share a param as this model's do (its option tie)"
    yield layers >= stages, f"{stages} stages need as many layers, the model has {layers}"
    if plan.split:
        yield len(plan.split) == stages, f"split names {len(plan.split)} stages, the schedule has {stages}"
        yield sum(plan.split) == layers, f"split adds up to {sum(plan.split)}, there are {layers} layers"
        yield min(plan.split) > 0, "split leaves a stage without a layer"
    yield from _schedule(plan)
    yield plan.zero in (0, 2, 3), "zero=1 goes with pp=1; use zero=2"
    if plan.devices:
        places, alone = len(plan.devices), plan.zero == 0 and plan.tp == plan.cp == plan.ep == 1
        yield places == plan.pp, f"devices names {places} places along pp, there are {plan.pp}"
        why = "what else moves between them cannot leave a GPU"
        yield alone, f"devices goes with pp and dp alone and zero=0: {why}"


def _schedule(plan: ParallelPlan) -> Iterator[Rule]:
    """The schedules' own rules, which torch would report once everything has started, or not at all."""
    pp, count, schedule = plan.pp, plan.num_microbatches, plan.schedule
    if schedule == "1f1b":
        yield count >= pp, f"1f1b needs microbatches={count} to be at least pp={pp}; gpipe does not"
    if schedule in ("interleaved", "zero-bubble"):
        rounds = max(1, count // pp)
        equal = f"in {rounds} rounds of pp={pp} or more, which must be equal: {count // pp * pp} would do"
        yield count % rounds == 0, f"{schedule} runs microbatches={count} {equal}"
    if schedule == "zbv":
        yield plan.stages in (1, 2), "zbv has exactly two stages a rank: stages=2 or none"
    if schedule in ("naive", "gpipe", "1f1b"):
        needs = f"stages={plan.stages} needs interleaved or zero-bubble"
        yield plan.stages == 1, f"{schedule} has one stage a rank: {needs}"
    if schedule in ("zero-bubble", "zbv"):
        freed = "computes gradients of weights after those of the inputs, when zero=3 has freed the params"
        yield plan.zero < 3, f"{schedule} {freed}: use zero=2"
        twice = "goes through a block twice, selective recomputation can do it once"
        selective = plan.activation_checkpoint == "selective"
        yield not selective, f"{schedule} {twice}: use activation_checkpoint=full"
        fused = "needs the gradients of inputs and weights apart, compile fuses them"
        yield not plan.compile, f"{schedule} {fused}"


def _no_pipeline(plan: ParallelPlan) -> Iterator[Rule]:
    yield not plan.split, "split needs pp of 2 or more"
    yield not plan.devices, "devices needs pp of 2 or more"
    yield plan.stages == 1, "stages needs pp of 2 or more"


def _data_parallel(plan: ParallelPlan) -> Iterator[Rule]:
    """The rules of zero, shards, grad_compression, batch_shares, rebalance and sync_every."""
    only_data = plan.zero <= 1 and plan.tp == plan.pp == plan.cp == plan.ep == 1
    if plan.zero == 1:
        yield plan.tp == 1, "zero=1 goes with tp=1; use zero=2"
    if plan.shards:
        yield plan.zero >= 2, "shards needs zero=2 or 3"
        yield plan.cp == 1, "shards goes with cp=1"
        yield plan.dp % plan.shards == 0, f"shards={plan.shards} must divide dp={plan.dp}"
    if plan.grad_compression != "fp32":
        yield only_data, f"grad_compression={plan.grad_compression} goes with dp alone and zero of 0 or 1"
    if plan.grad_compression == "onebit":
        yield plan.zero == 0, "onebit goes with zero=0: every process keeps all momenta"
    if plan.batch_shares:
        shares = len(plan.batch_shares)
        yield shares == plan.dp, f"batch_shares names {shares} shares, there are dp={plan.dp} ranks"
        yield plan.pp == 1, "stages need equal pieces: batch_shares goes with pp=1"
    if plan.rebalance:
        layout = "dp alone and zero of 0 or 1, where the speed of a rank can be measured"
        yield plan.dp > 1, "rebalance needs dp of 2 or more"
        yield only_data, f"rebalance goes with {layout}"
    if plan.sync_every:
        alone = plan.zero == 0 and plan.cp == plan.ep == 1 and plan.grad_compression == "fp32"
        yield alone, "sync_every goes with zero=0, cp=1, ep=1 and grad_compression=fp32"
        alike = "averages ranks alike and goes with equal shares: no batch_shares, no rebalance"
        yield not plan.batch_shares and not plan.rebalance, f"sync_every {alike}"


def _documents(plan: ParallelPlan, sizes: Sizes) -> Iterator[Rule]:
    packed = "data.packing = documents finds the ends of documents in the tokens of whole sequences"
    whole = not sizes.documents
    yield (
        whole or plan.cp == 1,
        f"{packed}, of which a cp rank has a part: use cp=1, or packing = concatenate",
    )
    yield (
        whole or plan.pp == 1,
        f"{packed}, which later stages do not see: use pp=1, or packing = concatenate",
    )


def _batch(plan: ParallelPlan, batch_size: int) -> Iterator[Rule]:
    count, rows = plan.num_microbatches, f"{batch_size} rows"
    shared = plan.dp * count
    yield plan.outer == "average" or plan.sync_every > 0, f"outer={plan.outer} needs sync_every"
    yield plan.offload == "none" or plan.zero == 3, f"offload={plan.offload} needs zero=3"
    each = f"shared by dp={plan.dp} ranks in {count} pieces each"
    yield batch_size >= shared, f"a batch of {rows} cannot be {each}"
    equal = f"dp·microbatches={shared} must divide the {rows} of a batch"
    yield plan.pp == 1 or batch_size % shared == 0, f"stages need equal pieces: {equal}"
