"""A recall model whose answers can come through recurrent state alone."""
