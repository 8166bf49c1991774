"""Which model speaks for which allocator."""

from typing import Final

from kvproof.model.base import AllocatorModel
from kvproof.model.config import Config, validate
from kvproof.model.hisparse import HisparseModel
from kvproof.model.hisparse_v4 import HisparseV4Model
from kvproof.model.interleave import InterleaveModel
from kvproof.model.mamba import MambaModel
from kvproof.model.paged import PagedModel
from kvproof.model.swa import SwaModel
from kvproof.model.swa_variants import PureSwaModel, SwaRingModel
from kvproof.model.token import TokenModel

_MODELS: Final[dict[str, type[AllocatorModel]]] = {
    "token": TokenModel,
    "paged": PagedModel,
    "swa": SwaModel,
    "swa-ring": SwaRingModel,
    "pure-swa": PureSwaModel,
    "hisparse": HisparseModel,
    "hisparse-v4": HisparseV4Model,
    "mamba": MambaModel,
    "page-interleave": InterleaveModel,
}


def model_for(config: Config) -> AllocatorModel:
    """A fresh model of this config. Raises UserError when the config is not valid."""
    return _MODELS[validate(config).allocator](config)
