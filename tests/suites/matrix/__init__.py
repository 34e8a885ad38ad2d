"""Engines of every pair of shapes: do they understand each other?"""
