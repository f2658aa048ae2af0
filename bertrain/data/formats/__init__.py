"""Data folders of every layout, in and out: our Arrow shards, HDF5, TFRecord, and conversions between them."""
