"""Requirements of the row store."""
