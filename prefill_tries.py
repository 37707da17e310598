"""Variants of the attention kernel: name -> changes of text, rows of a block, threads."""
import re
from pathlib import Path
from dataclasses import replace
import edgellm.kernels.prefill.launcher as launcher
from edgellm.kernels.launch import Kernel
TEXT = Path(launcher.__file__).with_name("attention.cu").read_text()
def variant(tiles=None, warps=4, keys=None, keep=None, blocks=2, stages=2):
    """Both sizes 64 and 128 are changed alike."""
    t = TEXT
    if tiles: t = t.replace("TILES = SIZE <= 128 ? 2 : 1", f"TILES = {tiles}")
    if keys: t = t.replace("KEYS = SIZE <= 128 ? 64 : 32", f"KEYS = {keys}")
    if keep is not None: t = t.replace("KEEPS_QUERIES = SIZE == 64;", f"KEEPS_QUERIES = {str(keep).lower()};")
    t = t.replace("__launch_bounds__(THREADS, 2)", f"__launch_bounds__(THREADS, {blocks})")
    t = re.sub(r"static_assert\(Shape<(64|128|256)>.*\n", "", t)
    return t, dict(tiles=tiles or 2, warps=warps, keys=keys or 64, stages=stages)
VARIANTS = {
    64: {"base": variant(), "1x8": variant(1, 8), "1x4": variant(1, 4, blocks=4), "2x4b3": variant(2, 4, keep=False, blocks=3), "2x8b1": variant(2, 8, blocks=1), "1x8k128": variant(1, 8, keys=128), "2x4k32": variant(2,4,keys=32), "s3": variant(stages=3)},
    128: {"base": variant(), "1x8b1": variant(1, 8, blocks=1), "1x4b3": variant(1, 4, blocks=3), "2x8b1": variant(2, 8, blocks=1), "2x4k32": variant(2, 4, keys=32), "s1x8keep": variant(1, 8, keep=True, blocks=1)},
}
def kernel(dtype, size, name):
    text, its = VARIANTS[size][name]
    base = launcher.attention_kernel(dtype, size)
    macros = tuple((k, {"HOST_WARPS": its["warps"], "HOST_STAGES": its["stages"]}.get(k, v)) for k, v in base.source.macros)
    source = replace(base.source, name=f"try_{size}_{name}", headers=(*base.source.headers, ("prefill/attention.cu", text)), macros=macros)
    rows = 16 * its["tiles"] * its["warps"]
    return Kernel(source, base.expression), rows, 32 * its["warps"], 2 * size * (rows + 2 * its["stages"] * its["keys"])

def main():
    import sys
    sys.path.insert(0, "tools/bench")
    import prefill_speed as speed
    from edgellm.kernels.launch import Launch
    import numpy as np
    bench = speed.Bench()
    for size, shape in ((64, "llama-1b"), (128, "llama-8b")):
        config = speed.SHAPES[shape]
        for name in VARIANTS[size]:
            line = []
            for tokens, start in ((512, 3488), (2048, 2048), (8000, 0)):
                cache = (1, config.num_kv_heads, start + tokens, size)
                rows = speed.KeyValueRows(bench.random(cache), bench.random(cache), bench.array_of(np.array([start], np.int32)))
                qkv = bench.random((1, tokens, (config.num_heads + 2 * config.num_kv_heads) * size))
                context = bench.random((1, tokens, config.num_heads * size))
                try:
                    k, block, threads, shared = kernel("float16", size, name)
                    check = bench.prefill._check
                    arguments = (qkv, rows, size**-0.5, context)
                    packed = check.pack("causal_attention", check("causal_attention", *arguments), *arguments)
                    launch = Launch(bench.module, k, (config.num_heads, 1, -(-tokens // block)), threads, shared, (packed,))
                    span = bench.milliseconds(launch)
                    operations = 4 * config.num_heads * size * (tokens * start + tokens * (tokens + 1) / 2)
                    line.append(f"{operations / span / 1e9:7.1f}")
                except Exception as error:
                    line.append(str(error)[:60])
            print(size, f"{name:10s}", *line, flush=True)

if __name__ == "__main__":
    main()
