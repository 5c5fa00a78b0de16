"""Requirements of the row store. KV-001 to KV-078 keep the numbers of facts/kvstore.md section 7."""
