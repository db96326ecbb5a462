package kube_test

import (
	"errors"
	"fmt"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"dlrover-run/internal/app/kube"
)

// apiServer is ours or Kubernetes' own.
type apiServer interface {
	AddNode(t *testing.T, name string)
	Account(t *testing.T, rights ...string) kube.Config
	// Admin is an account that may do everything.
	Admin(t *testing.T) kube.Config
	// Level is an account with the rights that docs/kubernetes gives for a level, and no more.
	Level(t *testing.T, l kube.Level) kube.Config
	// AddFaults has the cluster know ExternalFaults, from then on.
	AddFaults(t *testing.T)
}

// suite tests package kube and the API server against each other, through the API alone. Every test makes nodes of its
// own names, so that the server may be used for other things as well.
func suite(t *testing.T, start func(*testing.T) apiServer) {
	for _, c := range []struct {
		name string
		test func(*testing.T, *fixture)
	}{
		{"LevelsAreAppliedAndRemoved", testLevels},
		{"AMarkIsWrittenOnce", testOnce},
		{"ForeignCordonStays", testForeignCordon},
		{"ForeignTaintOfOurKeyStays", testForeignTaint},
		{"TwoOwnersHoldOneTaint", testTwoOwners},
		{"ManyMastersAtOnce", testManyMasters},
		{"AMarkThatWasRenewedStays", testRenewed},
		{"AMarkWithoutAnEndStays", testEndless},
		{"OneLevelReplacesAnother", testReplacedLevel},
		{"MarksAreFoundAfterARestart", testRestart},
		{"MarksAreFoundOnEveryPage", testPages},
		{"ANodeIsGone", testGone},
		{"AnAnnotationThatIsNotOursStays", testBrokenAnnotation},
		{"RightsThatAreMissingAreNamed", testRights},
		{"ATokenIsRefused", testBadToken},
		{"ATaintListIsReplacedAsAWhole", testTaintList},
		{"ExternalFaults", testExternalFaults},
		{"ExternalFaultsAreDone", testExternalFaultsAreDone},
		{"ExternalFaultsThatLinger", testExternalFaultsThatLinger},
	} {
		t.Run(c.name, func(t *testing.T) {
			cluster := start(t)
			c.test(t, &fixture{t, cluster, newAdmin(t, cluster.Admin(t))})
		})
	}
}

type fixture struct {
	t       *testing.T
	cluster apiServer
	admin   *admin
}

var (
	nodes   atomic.Int64
	vendor  = object{"key": "vendor.example/gpu", "value": "present", "effect": "NoSchedule"}
	vendors = kubeTaint{"vendor.example/gpu", "present", "NoSchedule"}
	since   = time.Now().UTC().Truncate(time.Second)
)

// node makes a node with a foreign taint.
func (f *fixture) node() string {
	f.t.Helper()
	name := fmt.Sprintf("kubetest-%d-%d.example", os.Getpid(), nodes.Add(1))
	f.admin.node(name, vendor)
	return name
}

// client may do what a level needs.
func (f *fixture) client(l kube.Level) *kube.Client { return client(f.t, f.cluster.Level(f.t, l)) }

func markOf(node, owner string) kube.Mark {
	return kube.Mark{
		Node: node, Owner: owner, Reason: "gpu.link", Evidence: "GPU 3: 41 GB/s, need 300", Since: since,
		Until: since.Add(4 * time.Hour),
	}
}

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func equal(t *testing.T, got, want any) {
	t.Helper()
	if !reflect.DeepEqual(got, want) {
		t.Fatalf("got  %#v\nwant %#v", got, want)
	}
}

func is(t *testing.T, err, want error) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Fatalf("got error %v, want %v", err, want)
	}
}

func testLevels(t *testing.T, f *fixture) {
	for _, l := range []kube.Level{kube.Condition, kube.Taint, kube.Cordon} {
		name, c := f.node(), f.client(l)
		before := f.admin.view(name)
		check(t, c.Apply(t.Context(), l, markOf(name, "job-a")))
		v := f.admin.view(name)
		value, tainted := v.ours()
		equal(t, []any{tainted, v.Cordoned, v.Conditions[kube.ConditionType] == "True"},
			[]any{l == kube.Taint, l == kube.Cordon, l == kube.Condition})
		equal(t, value, map[bool]string{true: "gpu.link"}[tainted])
		equal(t, v.Annotations[kube.Key] != "", true)
		equal(t, v.foreign(), before.foreign())
		equal(t, v.Conditions["Ready"], "True")
		check(t, c.Remove(t.Context(), markOf(name, "job-a")))
		after := f.admin.view(name)
		if l == kube.Condition {
			equal(t, after.Conditions[kube.ConditionType], "False")
			delete(after.Conditions, kube.ConditionType)
		}
		before.Version, after.Version = "", ""
		equal(t, after, before)
	}
	name := f.node()
	before := f.admin.view(name)
	check(t, f.client(kube.Event).Apply(t.Context(), kube.Event, markOf(name, "job-a")))
	check(t, f.client(kube.Event).Apply(t.Context(), kube.None, markOf(name, "job-b")))
	equal(t, f.admin.view(name), before)
	equal(t, len(f.admin.messages(name)), 1)
}

func testOnce(t *testing.T, f *fixture) {
	for _, l := range []kube.Level{kube.Event, kube.Condition, kube.Taint, kube.Cordon} {
		name, c := f.node(), f.client(l)
		check(t, c.Apply(t.Context(), l, markOf(name, "job-a")))
		v := f.admin.view(name)
		check(t, c.Apply(t.Context(), l, markOf(name, "job-a")))
		equal(t, f.admin.view(name), v)
		equal(t, f.admin.messages(name), []string{"gpu.link: GPU 3: 41 GB/s, need 300 (marked by job-a until " +
			since.Add(4*time.Hour).Format(time.RFC3339) + ")"})
	}
}

func testForeignCordon(t *testing.T, f *fixture) {
	name, c := f.node(), f.client(kube.Cordon)
	f.admin.patch(name, "", object{"spec": object{"unschedulable": true}})
	for range 2 {
		check(t, c.Apply(t.Context(), kube.Cordon, markOf(name, "job-a")))
	}
	check(t, c.Apply(t.Context(), kube.Cordon, markOf(name, "job-b")))
	check(t, c.Remove(t.Context(), markOf(name, "job-a")))
	check(t, c.Remove(t.Context(), markOf(name, "job-b")))
	equal(t, f.admin.view(name).Cordoned, true)
	equal(t, f.admin.view(name).Annotations[kube.Key], "")
}

func testForeignTaint(t *testing.T, f *fixture) {
	name, c := f.node(), f.client(kube.Taint)
	by := []object{
		vendor, {"key": kube.Key, "value": "by-hand", "effect": "NoSchedule"}, {"key": kube.Key, "effect": "NoExecute"},
	}
	f.admin.patch(name, "", object{"spec": object{"taints": by}})
	before := f.admin.view(name).Taints
	for range 2 {
		check(t, c.Apply(t.Context(), kube.Taint, markOf(name, "job-a")))
	}
	equal(t, f.admin.view(name).Taints, before)
	check(t, c.Remove(t.Context(), markOf(name, "job-a")))
	equal(t, f.admin.view(name).Taints, before)
}

func testTwoOwners(t *testing.T, f *fixture) {
	for _, l := range []kube.Level{kube.Condition, kube.Taint, kube.Cordon} {
		name, a, b := f.node(), f.client(l), f.client(l)
		marked := func() bool {
			v := f.admin.view(name)
			_, tainted := v.ours()
			return tainted || v.Cordoned || v.Conditions[kube.ConditionType] == "True"
		}
		check(t, a.Apply(t.Context(), l, markOf(name, "job-a")))
		check(t, b.Apply(t.Context(), l, markOf(name, "job-b")))
		equal(t, len(f.marks(a, name)), 2)
		check(t, a.Remove(t.Context(), markOf(name, "job-a")))
		equal(t, marked(), true)
		check(t, a.Remove(t.Context(), markOf(name, "job-a")))
		equal(t, f.marks(a, name), []kube.Mark{markOf(name, "job-b")})
		check(t, b.Remove(t.Context(), markOf(name, "job-b")))
		equal(t, marked(), false)
		equal(t, len(f.admin.messages(name)), 2)
	}
}

// marks are those on one node.
func (f *fixture) marks(c *kube.Client, name string) []kube.Mark {
	f.t.Helper()
	marks, errs := c.Marks(f.t.Context())
	check(f.t, errors.Join(errs...))
	return slices.DeleteFunc(marks, func(m kube.Mark) bool { return m.Node != name })
}

// Others change the node all the while, its taints too.
func testManyMasters(t *testing.T, f *fixture) {
	name := f.node()
	var masters sync.WaitGroup
	for i := range 3 {
		c, m := f.client(kube.Taint), markOf(name, fmt.Sprintf("job-%d", i))
		masters.Go(func() {
			for range 5 {
				if err := errors.Join(c.Apply(t.Context(), kube.Taint, m), c.Remove(t.Context(), m)); err != nil {
					t.Errorf("%s: %v", m.Owner, err)
				}
			}
		})
	}
	for i := range 10 {
		f.admin.patch(name, "", object{"metadata": object{"labels": object{"example/count": fmt.Sprint(i)}}})
	}
	masters.Wait()
	v := f.admin.view(name)
	_, tainted := v.ours()
	equal(t, []any{tainted, v.Annotations[kube.Key]}, []any{false, ""})
	equal(t, slices.Contains(v.Taints, vendors), true)
}

func testRenewed(t *testing.T, f *fixture) {
	name, c, m := f.node(), f.client(kube.Taint), markOf(f.node(), "job-a")
	m.Node = name
	longer := m
	longer.Until, longer.Reason = m.Until.Add(time.Hour), "net.loss"
	check(t, c.Apply(t.Context(), kube.Taint, m))
	check(t, c.Apply(t.Context(), kube.Taint, longer))
	value, _ := f.admin.view(name).ours()
	equal(t, value, "net.loss")
	check(t, c.Remove(t.Context(), m))
	equal(t, f.marks(c, name), []kube.Mark{longer})
	check(t, c.Remove(t.Context(), kube.Mark{Node: name, Owner: "job-a"}))
	equal(t, len(f.marks(c, name)), 0)
}

func testEndless(t *testing.T, f *fixture) {
	for _, l := range []kube.Level{kube.Condition, kube.Taint, kube.Cordon} {
		name, c := f.node(), f.client(l)
		m := markOf(name, "job-a")
		endless := m
		endless.Until = time.Time{}
		check(t, c.Apply(t.Context(), l, m))
		check(t, c.Apply(t.Context(), l, endless))
		equal(t, f.marks(c, name), []kube.Mark{endless})
		check(t, c.Remove(t.Context(), m))
		equal(t, f.marks(c, name), []kube.Mark{endless})
		check(t, c.Remove(t.Context(), endless))
		equal(t, len(f.marks(c, name)), 0)
	}
}

func testReplacedLevel(t *testing.T, f *fixture) {
	name, c := f.node(), client(f.t, f.cluster.Admin(t))
	for _, l := range []kube.Level{
		kube.Condition, kube.Taint, kube.Cordon, kube.Condition, kube.Cordon, kube.Taint, kube.Condition,
	} {
		check(t, c.Apply(t.Context(), l, markOf(name, "job-a")))
		v := f.admin.view(name)
		_, tainted := v.ours()
		equal(t, []any{tainted, v.Cordoned, v.Conditions[kube.ConditionType] == "True"},
			[]any{l == kube.Taint, l == kube.Cordon, l == kube.Condition})
	}
	equal(t, len(f.admin.messages(name)), 1)
}

func testRestart(t *testing.T, f *fixture) {
	for _, l := range []kube.Level{kube.Condition, kube.Taint, kube.Cordon} {
		m := markOf(f.node(), `ns/job "a"`)
		m.Evidence = `a "quoted" <word>, ünïcode`
		check(t, f.client(l).Apply(t.Context(), l, m))
		again := f.client(l)
		equal(t, f.marks(again, m.Node), []kube.Mark{m})
		check(t, again.Remove(t.Context(), f.marks(again, m.Node)[0]))
		equal(t, len(f.marks(again, m.Node)), 0)
	}
}

// Two pages of nodes at least, of which the first and the last node that are ours have marks.
func testPages(t *testing.T, f *fixture) {
	c, prefix := f.client(kube.Taint), f.node()
	var names []string
	for i := range 251 {
		name := fmt.Sprintf("%s.n%03d", prefix, i)
		body := object{"apiVersion": "v1", "kind": "Node", "metadata": object{"name": name}}
		f.admin.want("POST", "/api/v1/nodes", "application/json", body, nil)
		t.Cleanup(func() { f.admin.delete(name) })
		names = append(names, name)
	}
	for _, name := range []string{names[0], names[len(names)-1]} {
		check(t, c.Apply(t.Context(), kube.Taint, markOf(name, "job-a")))
		equal(t, f.marks(c, name), []kube.Mark{markOf(name, "job-a")})
	}
	equal(t, len(f.marks(c, names[0])), 1)
}

func testGone(t *testing.T, f *fixture) {
	name, c := f.node(), f.client(kube.Taint)
	check(t, c.Apply(t.Context(), kube.Taint, markOf(name, "job-a")))
	f.admin.delete(name)
	check(t, c.Remove(t.Context(), markOf(name, "job-a")))
	is(t, c.Apply(t.Context(), kube.Taint, markOf(name, "job-a")), kube.ErrNotFound)
	equal(t, len(f.marks(c, name)), 0)
}

func testBrokenAnnotation(t *testing.T, f *fixture) {
	name, c := f.node(), f.client(kube.Taint)
	f.admin.patch(name, "", object{"metadata": object{"annotations": object{kube.Key: "by hand"}}})
	before := f.admin.view(name)
	_, errs := c.Marks(t.Context())
	for _, err := range []error{
		c.Apply(t.Context(), kube.Taint, markOf(name, "a")), c.Remove(t.Context(), markOf(name, "a")), errors.Join(errs...),
	} {
		if err == nil || !strings.Contains(err.Error(), name) {
			t.Fatalf("got %v, want an error that names %s", err, name)
		}
	}
	equal(t, f.admin.view(name), before)
}

func testRights(t *testing.T, f *fixture) {
	missing := map[kube.Level]map[kube.Level][]string{
		kube.Event: {
			kube.Condition: {"get nodes", "list nodes", "patch nodes/status"},
			kube.Taint:     {"get nodes", "list nodes", "patch nodes"},
			kube.Cordon:    {"get nodes", "list nodes", "patch nodes"},
		},
		kube.Condition: {kube.Taint: {"patch nodes"}, kube.Cordon: {"patch nodes"}},
		kube.Taint:     {kube.Condition: {"patch nodes/status"}},
	}
	for has, lacks := range missing {
		c, name := f.client(has), f.node()
		for _, l := range []kube.Level{kube.None, kube.Event, kube.Condition, kube.Taint, kube.Cordon} {
			got, err := c.Allowed(t.Context(), l)
			check(t, err)
			equal(t, got, lacks[l])
		}
		for l := range maps.Keys(lacks) {
			is(t, c.Apply(t.Context(), l, markOf(name, "job-a")), kube.ErrForbidden)
		}
		equal(t, f.admin.view(name).Annotations[kube.Key], "")
	}
}

func testBadToken(t *testing.T, f *fixture) {
	cfg := f.cluster.Level(t, kube.Taint)
	cfg.TokenFile = filepath.Join(t.TempDir(), "token")
	const secret = "nobodys-secret-token"
	check(t, os.WriteFile(cfg.TokenFile, []byte(secret), 0o600))
	err := client(f.t, cfg).Apply(t.Context(), kube.Taint, markOf(f.node(), "job-a"))
	is(t, err, kube.ErrUnauthorized)
	equal(t, strings.Contains(err.Error(), secret), false)
}

// What makes reading, patching with the version, and trying again necessary.
func testTaintList(t *testing.T, f *fixture) {
	name := f.node()
	stale := f.admin.view(name).Version
	own := object{"key": "example/own", "effect": "NoSchedule"}
	f.admin.patch(name, "", object{"spec": object{"taints": []object{own}}})
	equal(t, slices.Contains(f.admin.view(name).Taints, vendors), false)
	path, kind := "/api/v1/nodes/"+name, "application/merge-patch+json"
	late := object{"metadata": object{"resourceVersion": stale}, "spec": object{"taints": []object{vendor}}}
	code, _ := f.admin.do("PATCH", path, kind, late)
	equal(t, code, http.StatusConflict)
	twice := object{"spec": object{"taints": []object{own, own}}}
	code, _ = f.admin.do("PATCH", path, kind, twice)
	equal(t, code, http.StatusUnprocessableEntity)
	f.admin.patch(name, "/status", object{"spec": object{"unschedulable": true}})
	equal(t, f.admin.view(name).Cordoned, false)
	f.admin.patch(name, "", object{"status": object{"conditions": []object{}}})
	equal(t, f.admin.view(name).Conditions["Ready"], "True")
}
