import time,sys
from jax_splitk.kernels.dot import tma
from jax_splitk.problems.dot_general import DotProblem
from jax_splitk.runtime import compiler
from jax_splitk.runtime.target import DEFAULT_CUDA
p=DotProblem(1,256,1024,8192,"bkm","bkn","bfloat16","float32")
F=tma.FAMILY
for p,c in [(p,tma.Config(128,128,6,1,"none")),(p,tma.Config(128,256,4,2,"cluster")),(p,tma.Config(64,64,8,8,"cluster")),(p,tma.Config(256,128,4,8,"workspace")),(DotProblem(1,256,1024,8192,"bmk","bnk","float32","float32"),tma.Config(192,192,4,2,"cluster")),(DotProblem(3,250,1032,8192,"bmk","bkn","float16","bfloat16"),tma.Config(64,192,4,1,"none"))]:
    t=time.time()
    print(c, F.refusal(p,c))
    r=compiler.compile_source(F.plan(p,c).source)
    print(round(time.time()-t,2), [x for x in r.log.splitlines() if 'spill' in x or 'registers' in x][:2])
