"""Faults that an engineer could make, planted one at a time: do the tests of ``make test`` catch them?"""
