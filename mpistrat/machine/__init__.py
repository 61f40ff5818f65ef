"""This host: cores, caches, memory limits, devices, network links, private files, and lines on stderr."""
