"""Layouts: rules applied to dimensions, where a program gets a constraint, and arrays put on a mesh."""
