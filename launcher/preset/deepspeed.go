package preset

import (
	"slices"
	"strconv"
	"strings"
)

// deepspeed is torch's environment plus the additions of DeepSpeed's own launcher for each rank, with the argument.
func deepspeed() Preset {
	return Preset{
		Name: "deepspeed", Devices: true,
		Args: func(v Vars) []string { return []string{"--local_rank=" + strconv.Itoa(torchLocalRank(v))} },
		vars: slices.Concat(torchVars(), []variable{
			number("LOCAL_SIZE", func(v Vars) int { return v.LocalWorldSize }),
			number("CROSS_RANK", func(v Vars) int { return v.GroupRank }),
			number("CROSS_SIZE", func(v Vars) int { return v.GroupWorldSize }),
			visible("CUDA_VISIBLE_DEVICES", func(v Vars) bool { return v.Device != "ascend" }),
			visible("ASCEND_RT_VISIBLE_DEVICES", func(v Vars) bool { return v.Device == "ascend" }),
		}),
	}
}

// visible names one device for each of the node's workers, to all of them, unless the variable is inherited.
func visible(name string, when func(Vars) bool) variable {
	row := only(when, variable{name, func(v Vars) (string, bool, error) {
		_, found := v.Parent.lookup(name)
		return numbers(v.LocalWorldSize), !found, nil
	}})
	return only(func(v Vars) bool { return !v.VirtualLocalRank }, row)
}

// numbers is the list 0,1,...,n-1.
func numbers(n int) string {
	list := make([]string, n)
	for i := range list {
		list[i] = strconv.Itoa(i)
	}
	return strings.Join(list, ",")
}

// torchft is torch's environment: each replica group is a job of its own, and its script finds the others through the
// lighthouse.
func torchft() Preset {
	return Preset{Name: "torchft", Wants: []string{"TORCHFT_LIGHTHOUSE"}, vars: torchVars()}
}
