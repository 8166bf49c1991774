"""Which model speaks for which allocator."""

from typing import Final

from kvproof.model.base import AllocatorModel
from kvproof.model.config import Config, validate
from kvproof.model.paged import PagedModel
from kvproof.model.token import TokenModel

_MODELS: Final[dict[str, type[AllocatorModel]]] = {"paged": PagedModel, "token": TokenModel}


def model_for(config: Config) -> AllocatorModel:
    """A fresh model of this config. Raises UserError when the config is not valid."""
    return _MODELS[validate(config).allocator](config)
