package warm

import (
	"fmt"
	"log/slog"
	"testing"

	"github.com/stretchr/testify/require"
)

// A worker that was started warm tells only of modules that it has imported itself; one that was executed, of all.
func TestReportOfAWorkerMeetsWhatItsParentHas(t *testing.T) {
	script := []string{"torch", "torch.nn"} // what the parent has imported, for the script's sake
	var more []string
	for i := range worthImporting {
		more = append(more, fmt.Sprintf("more%d", i))
	}
	s := New(Config{Mode: modeFork, Slots: 1, Log: slog.New(slog.DiscardHandler)})
	s.pool.Want(recipe{})
	s.pool.Calm(true)
	s.parents[s.pool.Parent()] = &parent{names: script}
	warm, executed := &worker{child: &child{}}, &worker{}

	s.workers[0] = warm
	require.Nil(t, s.recipe(learned{}), "nothing new")
	require.Nil(t, s.recipe(learned{Modules: more[1:]}), "not worth another import")
	require.Equal(t, more, s.recipe(learned{Modules: more}).Modules)
	s.workers[0] = executed
	require.Nil(t, s.recipe(learned{Modules: script}), "all of it is known")
	all := append(script, more...)
	require.Equal(t, all, s.recipe(learned{Modules: all}).Modules)

	s.pool.Want(recipe{Modules: more}) // and the parent has the script's
	require.Nil(t, s.recipe(learned{Modules: all}))
	s.workers[0] = warm
	again := []string{"z0", "z1", "z2", "z3", "z4", "z5", "z6", "z7", "z8", "z9"}
	require.Equal(t, append(more, again...), s.recipe(learned{Modules: again}).Modules, "in the order of the imports")
}
