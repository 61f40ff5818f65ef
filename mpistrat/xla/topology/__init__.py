"""Where the cores of TPUs are, and which of them a replica gets. Nothing here looks at a device."""
