"""Block masks: which tiles are empty, full, partial."""

from .build import TILE as TILE
from .build import build as build
from .build import cached_build as cached_build
from .build import clear_block_cache as clear_block_cache
from .mask import BlockMask as BlockMask
from .mask import formula_of as formula_of
from .mask import from_dense as from_dense
from .mask import unbuilt_mask as unbuilt_mask
from .provenance import Provenance as Provenance
from .provenance import check_tiles as check_tiles
from .runs import Runs as Runs
from .superset import superset_tiles as superset_tiles
from .tiles import Tiles as Tiles
from .unbuilt import Unbuilt as Unbuilt
from .unbuilt import depends_on_rows as depends_on_rows
from .unbuilt import facts_under_compile as facts_under_compile
from .unbuilt import lower_mask as lower_mask
from .unbuilt import versions_of as versions_of
