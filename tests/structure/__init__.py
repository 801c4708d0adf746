"""The product's structure: sizes of modules and functions, import chains, folders that import each other."""
