#%Module1.0
## hpcpar @{version} for Environment Modules, made by `make install-module`: what is changed here is lost when it is
## made again.

set root @{root}
set mpi @{mpi}

proc ModulesHelp {} {
    puts stderr {
hpcpar trains PyTorch models across nodes over plain MPI (@{library}; torch @{torch}; Python @{python}).

    hpcpar doctor                             what is found here, and what to do about what is wrong
    hpcpar run -n 2 train.py                  srun in an allocation, else mpiexec
    srun python train.py                      in a Slurm allocation
    ls $HPCPAR_ROOT/share/hpcpar              examples and job scripts
}
}

module-whatis {Name: hpcpar}
module-whatis {Version: @{version}}
module-whatis {Description: @{summary}}
module-whatis {Keywords: machine learning, training, PyTorch, MPI, Python}

conflict hpcpar
if {$mpi ne "own"} {
    # The wheel's mpiexec is in front on the PATH: a job takes one MPI.
    conflict cray-mpich impi intel-mpi intelmpi mpich MPICH mvapich mvapich2 MVAPICH2 openmpi OpenMPI
    if {[llength [info commands family]]} {
        family mpi
    }
}
foreach name {@{needs_tcl}} {
    module load $name
}

# Set a variable; what a user had set is back after the module has gone. Not pushenv: it came with 5.1, and 5.2
# loses the user's value when one version is swapped for another. There the unload and the load share a process, in
# which the variables that the unload removes can still be seen: so what is kept already is not looked up again.
proc put {name value} {
    global env
    set kept HPCPAR_MODULE_KEPT_$name
    if {[module-info mode load]} {
        if {[info exists env($kept)]} {
            setenv $kept $env($kept)
        } elseif {[info exists env($name)]} {
            setenv $kept =$env($name)
        } else {
            setenv $kept unset
        }
    }
    if {[module-info mode unload] && [info exists env($kept)]} {
        set before $env($kept)
        setenv $kept $before
        if {[string index $before 0] eq "="} {
            unsetenv $name [string range $before 1 end]
            return
        }
    }
    setenv $name $value
}

put HPCPAR_ROOT $root
put SLURM_KILL_BAD_EXIT 1
if {"@{srun_mpi}" ne ""} {
    put SLURM_MPI_TYPE @{srun_mpi}
}
if {$mpi ne "own"} {
    # Also for Python in an environment of the user's own, which has no MPI beside it.
    put MPI4PY_LIBMPI $root/lib
}
prepend-path PATH $root/bin
