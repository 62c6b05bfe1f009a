-- hpcpar @{version} for Lmod, made by `make install-module`: what is changed here is lost when it is made again.

local root = "@{root}"
local mpi = "@{mpi}"

help([[
hpcpar trains PyTorch models across nodes over plain MPI (@{library}; torch @{torch}; Python @{python}).

    hpcpar doctor                             what is found here, and what to do about what is wrong
    hpcpar run -n 2 train.py                  srun in an allocation, else mpiexec
    srun python train.py                      in a Slurm allocation
    ls $HPCPAR_ROOT/share/hpcpar              examples and job scripts
]])

whatis("Name: hpcpar")
whatis("Version: @{version}")
whatis("Description: @{summary}")
whatis("Keywords: machine learning, training, PyTorch, MPI, Python")

family("hpcpar")
if mpi ~= "own" then
    -- The wheel's mpiexec is in front on the PATH: a job takes one MPI.
    family("mpi")
end
for _, name in ipairs({@{needs_lua}}) do
    depends_on(name)
end

-- pushenv, not setenv: what a user had set is back after the module has gone.
pushenv("HPCPAR_ROOT", root)
pushenv("SLURM_KILL_BAD_EXIT", "1")
if "@{srun_mpi}" ~= "" then
    pushenv("SLURM_MPI_TYPE", "@{srun_mpi}")
end
if mpi ~= "own" then
    -- Also for Python in an environment of the user's own, which has no MPI beside it.
    pushenv("MPI4PY_LIBMPI", pathJoin(root, "lib"))
end
prepend_path("PATH", pathJoin(root, "bin"))
