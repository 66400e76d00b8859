"""KV caches, and attention under the signatures of other libraries."""

from tilewright.serving.paged_cache import PagedCache
from tilewright.serving.signatures import (
    BatchDecodeWithPagedKVCacheWrapper,
    block_table_from_csr,
    flash_attn_with_kvcache,
    flash_mla_with_kvcache,
    get_mla_metadata,
)

__all__ = [
    "BatchDecodeWithPagedKVCacheWrapper",
    "PagedCache",
    "block_table_from_csr",
    "flash_attn_with_kvcache",
    "flash_mla_with_kvcache",
    "get_mla_metadata",
]
