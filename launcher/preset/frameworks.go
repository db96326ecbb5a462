package preset

import (
	"bytes"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// jax lets jax.distributed.initialize() find everything by itself. JAX reads only the first variable; for the rest it
// looks for the cluster that it is in. It looks for Open MPI's cluster first, so that an allocation of Slurm around
// this launcher does not count. Without the URI it would take Open MPI for release 5, and ask for mpi4py. JAX catches
// SIGTERM and passes it to code that asks for it.
func jax() Preset {
	return Preset{
		Name: "jax", World: true, Ports: onePort, Devices: true, QuickRestart: true,
		vars: slices.Concat(ranks(), process(), []variable{
			{"JAX_COORDINATOR_ADDRESS", serviceEndpoint},
			number("JAX_NUM_PROCESSES", func(v Vars) int { return v.WorldSize }),
			number("JAX_PROCESS_ID", func(v Vars) int { return v.Rank }),
			only(oneOfMany, inheritedOf("JAX_LOCAL_DEVICE_IDS", func(v Vars) string { return numbers(v.Devices) })),
			inherited("JAX_CPU_COLLECTIVES_IMPLEMENTATION", "gloo"),
			{"OMPI_MCA_orte_hnp_uri", func(v Vars) (string, bool, error) {
				at, _, err := serviceEndpoint(v)
				return orteURI(0, at), true, err
			}},
			number("OMPI_COMM_WORLD_SIZE", func(v Vars) int { return v.WorldSize }),
			number("OMPI_COMM_WORLD_RANK", func(v Vars) int { return v.Rank }),
			number("OMPI_COMM_WORLD_LOCAL_RANK", torchLocalRank),
			ompiVersion(),
		}),
	}
}

// oneOfMany: the worker has all devices of its node, which JAX would not take from a launcher that numbers processes.
func oneOfMany(v Vars) bool { return v.LocalWorldSize == 1 && v.Devices > 1 && !v.VirtualLocalRank }

// orteURI is how Open MPI names the head process of a job; at is an address and port.
func orteURI(job int, at string) string {
	kind := "tcp"
	if strings.HasPrefix(at, "[") {
		kind = "tcp6"
	}
	return fmt.Sprintf("%d.0;%s://%s", job, kind, at)
}

// ompiVersion hides an installed Open MPI 5 from JAX.
func ompiVersion() variable {
	return only(func(v Vars) bool { _, found := v.Parent.lookup("OMPI_VERSION"); return found },
		text("OMPI_VERSION", func(Vars) string { return "4.1.0" }))
}

// tensorflow is TF_CONFIG with every rank as a worker, for tf.distribute's MultiWorkerMirroredStrategy, which catches
// SIGTERM as JAX does.
func tensorflow() Preset {
	return Preset{
		Name: "tensorflow", World: true, Ports: aPortEach, Devices: true, QuickRestart: true,
		vars: slices.Concat(ranks(), process(), []variable{
			{"TF_CONFIG", tfConfig},
			only(func(v Vars) bool { return v.LocalWorldSize > 1 && v.Devices > 0 && !v.VirtualLocalRank },
				variable{"CUDA_VISIBLE_DEVICES", ownDevice}),
		}),
	}
}

func aPortEach(slots int) int { return slots }

func tfConfig(v Vars) (string, bool, error) {
	workers, err := v.endpoints()
	if err != nil {
		return "", false, err
	}
	type task struct {
		Type  string `json:"type"`
		Index int    `json:"index"`
	}
	var text bytes.Buffer
	enc := json.NewEncoder(&text)
	enc.SetEscapeHTML(false)
	err = enc.Encode(struct {
		Cluster map[string][]string `json:"cluster"`
		Task    task                `json:"task"`
	}{map[string][]string{"worker": workers}, task{"worker", v.Rank}})
	return strings.TrimSpace(text.String()), true, err
}

// ownDevice is the worker's own device: TensorFlow would take all, and its processes cannot share any.
func ownDevice(v Vars) (string, bool, error) {
	v.VirtualLocalRank = true
	return virtualDevice(v)
}

// paddle is the environment that paddle.distributed.launch sets for a collective job. Rank 0 serves a store at the
// first endpoint; an inherited MASTER_ADDR and MASTER_PORT would take precedence.
func paddle() Preset {
	return Preset{
		Name: "paddle", World: true, Ports: aPortEach, Devices: true,
		vars: slices.Concat(ranks(), process(), []variable{
			{"MASTER_ADDR", serviceAddr},
			{"MASTER_PORT", servicePort},
			{"PADDLE_MASTER", serviceEndpoint},
			{"PADDLE_TRAINER_ENDPOINTS", func(v Vars) (string, bool, error) {
				all, err := v.endpoints()
				return strings.Join(all, ","), true, err
			}},
			{"PADDLE_CURRENT_ENDPOINT", func(v Vars) (string, bool, error) {
				all, err := v.endpoints()
				if err != nil {
					return "", false, err
				}
				return all[v.Rank], true, nil
			}},
			number("PADDLE_TRAINER_ID", func(v Vars) int { return v.Rank }),
			number("PADDLE_TRAINERS_NUM", func(v Vars) int { return v.WorldSize }),
			number("PADDLE_GLOBAL_RANK", func(v Vars) int { return v.Rank }),
			number("PADDLE_GLOBAL_SIZE", func(v Vars) int { return v.WorldSize }),
			number("PADDLE_LOCAL_RANK", torchLocalRank),
			number("PADDLE_LOCAL_SIZE", func(v Vars) int { return v.LocalWorldSize }),
			number("PADDLE_RANK_IN_NODE", func(v Vars) int { return v.LocalRank }),
			number("PADDLE_NNODES", func(v Vars) int { return v.GroupWorldSize }),
			paddleDevices("FLAGS_selected_gpus", "cuda", "rocm", "metax"),
			paddleDevices("FLAGS_selected_npus", "ascend"),
			only(func(v Vars) bool { return v.Devices == 0 }, inherited("PADDLE_DISTRI_BACKEND", "gloo")),
		}),
	}
}

// paddleDevices returns the devices of a worker on a node with a kind of device: its own one, or all if it is alone.
func paddleDevices(name string, kinds ...string) variable {
	return only(func(v Vars) bool { return v.Devices > 0 && slices.Contains(kinds, v.Device) },
		inheritedOf(name, func(v Vars) string {
			if v.LocalWorldSize == 1 && !v.VirtualLocalRank {
				return numbers(v.Devices)
			}
			return strconv.Itoa(torchLocalRank(v))
		}))
}

// mpi is torch's environment and the variables that give scripts without MPI_Init their rank, under the names of Open
// MPI, of MPICH and Intel MPI, of MVAPICH and of PMIx.
func mpi() Preset {
	rows := torchVars()
	each := func(get func(Vars) int, names ...string) {
		for _, name := range names {
			rows = append(rows, number(name, get))
		}
	}
	each(func(v Vars) int { return v.Rank }, "OMPI_COMM_WORLD_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK", "PMIX_RANK")
	each(func(v Vars) int { return v.WorldSize }, "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
	each(torchLocalRank, "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "MV2_COMM_WORLD_LOCAL_RANK")
	each(func(v Vars) int { return v.LocalWorldSize }, "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS",
		"MV2_COMM_WORLD_LOCAL_SIZE")
	each(func(v Vars) int { return v.LocalRank }, "OMPI_COMM_WORLD_NODE_RANK")
	return Preset{Name: "mpi", vars: append(rows, ompiVersion(), text("OMPI_MCA_orte_hnp_uri", func(v Vars) string {
		return orteURI(v.MasterPort<<12, endpoint(v.MasterAddr, portText(v.MasterPort))) // JAX makes a port of the job
	}))}
}
