"""The fork: a pinned release of upstream plus insert-only patches, laid out under megatron/."""
