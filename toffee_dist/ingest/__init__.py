"""From edges of any source to a staged tensor, a node registry and a time grid."""
