"""SGLang: its process, its HTTP client, the pool of engines, and support for machines without a GPU."""
