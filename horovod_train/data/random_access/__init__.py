"""Records that can be read by number: arrays, HDF5, Parquet, images and other files, and a user's own class.

Start with `source.open_described`; formats has one file for each kind of storage.
"""
