"""Services of Google's cloud and of Kubernetes, as servers on this machine."""
