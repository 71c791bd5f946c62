"""Forward passes whose attention forms no [query, key] matrix."""
