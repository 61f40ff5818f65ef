"""`mpistrat init`: writes a training script, its batch script and its test. This folder holds their templates."""
