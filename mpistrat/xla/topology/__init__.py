"""The mesh of TPU cores, and the assignment of cores to replicas. Nothing here looks at a device."""
