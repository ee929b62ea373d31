"""The list of metrics that are measured in one sweep over the images. A new metric adds a line to it."""

from __future__ import annotations

from likethat.metrics.background import Background
from likethat.metrics.consistency import Consistency
from likethat.metrics.coverage import Coverage
from likethat.metrics.decisive import Decisive
from likethat.metrics.degradation import Degradation
from likethat.metrics.deletion import Deletion
from likethat.metrics.distinctness import Distinctness
from likethat.metrics.leakage import Leakage
from likethat.metrics.misalignment import Misalignment
from likethat.metrics.purity import Purity, PurityOfUnseen
from likethat.metrics.receptive_field import ReceptiveField
from likethat.metrics.redundancy import Redundancy
from likethat.metrics.sparsity import Sparsity
from likethat.metrics.stability import Stability
from likethat.metrics.sweep import Metric
from likethat.metrics.transformations import Transformations

# In the order of the tables.
METRICS: tuple[type[Metric], ...] = (
    Consistency,
    Stability,
    Purity,
    PurityOfUnseen,
    Coverage,
    Decisive,
    Transformations,
    Degradation,
    Misalignment,
    ReceptiveField,
    Deletion,
    Leakage,
    Distinctness,
    Background,
    Redundancy,
    Sparsity,
)
