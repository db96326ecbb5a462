package preset

import "slices"

// mindspore is the environment that msrun sets for a worker. A worker without a rank in MS_NODE_ID gets one in the
// order of arrival.
func mindspore() Preset {
	return Preset{
		Name: "mindspore", World: true, Ports: onePort, Success: "rank0", Sides: mindsporeSides,
		vars: slices.Concat(ranks(), process(), mindsporeJob(), []variable{
			only(meets, text("MS_ROLE", func(Vars) string { return "MS_WORKER" })),
			only(meets, number("MS_NODE_ID", func(v Vars) int { return v.Rank })),
			unlessSimulated("RANK_ID", func(v Vars) int { return v.Rank }),
			number("DEVICE_ID", torchLocalRank),
			mindsporeLogDir(),
		}),
	}
}

// mindsporeJob is common to the workers and their scheduler.
func mindsporeJob() []variable {
	return []variable{
		unlessSimulated("MS_WORKER_NUM", func(v Vars) int { return v.WorldSize }),
		unlessSimulated("RANK_SIZE", func(v Vars) int { return v.WorldSize }),
		only(meets, variable{"MS_SCHED_HOST", serviceAddr}),
		only(meets, variable{"MS_SCHED_PORT", servicePort}),
		inherited("MS_TOPO_TIMEOUT", "600"), // seconds
		mindsporeServers(),
		mindsporeRecovery(),
	}
}

// meets: workers that simulate a larger job have no peers and no scheduler.
func meets(v Vars) bool {
	level, _ := v.Parent.lookup("MS_SIMULATION_LEVEL")
	return level == ""
}

// unlessSimulated is a number that the user of a simulation may set for the simulated job.
func unlessSimulated(name string, get func(Vars) int) variable {
	return only(func(v Vars) bool {
		_, said := v.Parent.lookup(name)
		return meets(v) || !said
	}, number(name, get))
}

func onePort(int) int { return 1 }
