"""Files by their path, on a local disk or in an object store. Only here are fsspec and its drivers known."""
