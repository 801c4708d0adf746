"""The table `[privacy]` of the experiment file (`docs/privacy.md`), and the defaults of its mechanism."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from coordinator.document_checks import Section

if TYPE_CHECKING:
    from coordinator.experiments.schema import FleetKind

Mechanism = Literal["central", "local", "distributed", "ftrl", "example"]
AccountantName = Literal["pld", "rdp"]
Sampling = Literal["poisson", "fixed", "none"]
Noise = Literal["banded", "tree", "skellam", "discrete_gaussian"]

BY_CLIENTS: tuple[Mechanism, ...] = ("local", "distributed", "example")
"""Mechanisms whose noise clients add, to their updates or to the gradients of single rows."""

DELTA = 1e-5
CLIP_QUANTILE = 0.5
"""Andrew 2021, section 4: the median works for every task that they tried."""
CLIP_LEARNING_RATE = 0.2


class Privacy(Section):
    """What nobody may learn of a client, and how that is ensured. Without `mechanism` there is no differential privacy."""

    mechanism: Mechanism | None = None
    """Where noise is added: central (by the coordinator, to the sum of a round), ftrl (the same, correlated), distributed (by clients, inside secure aggregation), local (by each client), example (by each client, to hide single rows: DP-SGD); default: nowhere."""
    clip_norm: Annotated[float, Field(gt=0, le=1e9)] | None = None
    """Largest L2 norm of a client's whole update, which a longer one is scaled down to; with adaptive clipping that of the first round. Of example: of a row's gradient."""
    clipping: Literal["fixed", "adaptive"] | None = None
    """Whether clip_norm stays, or follows a quantile of the norms; default: fixed."""
    clip_quantile: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Share of updates that adaptive clipping leaves as they are; default: 0.5."""
    clip_learning_rate: Annotated[float, Field(gt=0, le=10)] | None = None
    """Step of the logarithm of clip_norm in adaptive clipping; default: 0.2."""
    noise_multiplier: Annotated[float, Field(ge=0.05, le=1e6)] | None = None
    """Standard deviation of the noise as a multiple of clip_norm; or epsilon, not both."""
    epsilon: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """Epsilon that all rounds together spend, from which the noise is computed; or noise_multiplier, not both."""
    delta: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Delta of the guarantee, well below one over the number of clients; default: 1e-5."""
    accountant: AccountantName | None = None
    """How epsilon is computed: by the privacy loss distribution, or by Rényi divergences; default: pld, or rdp for fixed."""
    sampling: Sampling | None = None
    """How rounds get their clients: each by itself at random (poisson), so many at random (fixed), or nobody knows how (none)."""
    budget: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """Epsilon beyond which no round begins; default: epsilon, or no limit."""
    secure_aggregation: bool | None = None
    """Whether the coordinator learns only sums of the clients of a group; default: no."""
    group_size: Annotated[int, Field(ge=3, le=2048)] | None = None
    """Clients whose updates secure aggregation adds up, at least; default: 16."""
    threshold: Annotated[float, Field(ge=0.6666, le=1)] | None = None
    """Share of a group that has to stay until its sum is known; default: 0.67."""
    value_bits: Annotated[int, Field(ge=8, le=32)] | None = None
    """Of a value in secure aggregation, to which it is rounded; default: 16."""
    noise: Noise | None = None
    """Of ftrl, how the noise of rounds is correlated: banded (default) or tree; of distributed, its distribution on integers: skellam (default) or discrete_gaussian."""
    minimum_separation: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """Of ftrl and where clients add the noise, rounds from one in which a client takes part to the next at the earliest; needs that many cohorts of clients; default: 1, ftrl: none."""
    bands: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """Of banded noise, how many rounds' noise is correlated, at most minimum_separation; 1 is independent noise; default: minimum_separation."""

    @property
    def clip_norm_on_devices(self) -> float:
        """To what norm devices scale their updates down before anything else. 0 with adaptive clipping, which needs their norms as they are:
        the coordinator clips. 0 where they clip as they add noise."""
        if self.mechanism in (None, *BY_CLIENTS) or self.clipping == "adaptive":
            return 0.0
        return self.clip_norm or 0.0

    @property
    def changes_updates_on_devices(self) -> bool:
        """Whether devices clip their updates, or add noise."""
        return self.clip_norm_on_devices > 0 or self.mechanism in BY_CLIENTS

    @property
    def is_given(self) -> bool:
        """Whether any key has a value."""
        return self != Privacy()


def complete(table: Privacy, fleet: FleetKind) -> Privacy:
    """The table with the defaults of its mechanism."""
    if table.mechanism is None:
        return table
    unknown = fleet == "devices" or table.mechanism in ("ftrl", *BY_CLIENTS)
    sampling = table.sampling or ("none" if unknown else "poisson")
    defaults: dict[str, Any] = {
        "clipping": "fixed",
        "delta": DELTA,
        "sampling": sampling,
        "accountant": "rdp" if sampling == "fixed" or table.mechanism == "distributed" else "pld",
        "budget": table.epsilon,
    }
    if table.clipping == "adaptive":
        defaults |= {"clip_quantile": CLIP_QUANTILE, "clip_learning_rate": CLIP_LEARNING_RATE}
    if table.mechanism in BY_CLIENTS:
        defaults["minimum_separation"] = 1
    if table.mechanism == "distributed":
        defaults["noise"] = "skellam"
    if table.mechanism == "ftrl":
        defaults["noise"] = "banded"
        if table.noise != "tree" and table.minimum_separation is not None:
            defaults["bands"] = table.minimum_separation
    missing = {key: value for key, value in defaults.items() if getattr(table, key) is None}
    return table.model_copy(update=missing)
