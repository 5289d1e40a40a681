"""effuse serves diffusion language models with prefill and decode on separate workers.

Each package is a folder at the top of the repository; the links beside this file give them their
name, so that one path is enough for an interpreter, a type checker and an editor.
"""
